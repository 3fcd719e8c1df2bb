#include "models/decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "basin/base/error.h"
#include "kv/sequence_cache.h"
#include "models/bind.h"
#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {
namespace {

// Rows of logits that are in memory at a time: 64 rows of a 150,000 word vocabulary are 38 MB.
constexpr std::int64_t kLogitRows = 64;

class Decoder : public Model {
 public:
  Decoder(const Architecture& architecture, Format format, ModelConfig config, TensorTable tensors,
          std::shared_ptr<const void> owner)
      : config_(std::move(config)), owner_(std::move(owner)) {
    const bool gguf = format == Format::gguf;
    const TensorNames names = gguf ? architecture.gguf_names() : architecture.hugging_face_names();
    const float norm_offset = gguf ? 0.0f : architecture.norm_offset;
    make_ropes(tensors, names);
    bind_ends(tensors, names, norm_offset);
    layers_ = bind_layers(architecture, config_, names, norm_offset, tensors);
    say_what_follows();
    for (std::int64_t i = 0; i < config_.extra_layers; ++i)
      tensors.leave_out(fmt::format("{}{}.", names.layer_prefix, std::ssize(config_.layers) + i));
    tensors.refuse_unused();
    parameters_ = tensors.parameters();
    weight_bytes_ = tensors.weight_bytes();
  }

  const ModelConfig& config() const override { return config_; }
  std::int64_t parameters() const override { return parameters_; }
  std::int64_t weight_bytes() const override { return weight_bytes_; }
  std::int64_t token_weight_bytes() const override {
    std::int64_t bytes = stored_bytes(head_);
    for (const Layer& layer : layers_) bytes += layer_bytes(layer);
    return bytes;
  }

  attention::Ran forward(std::span<const Chunk> chunks, const PassOptions& options, const OnLogits& on_logits,
                         ThreadPool& pool) override {
    check(chunks, options);
    Pass pass{config_, chunks, options, embed(chunks), make_rotation(chunks, *rope_), {}, {}, work_, pool};
    if (local_rope_) pass.local_rotation = make_rotation(chunks, *local_rope_);
    if (index_rope_) pass.index_rotation = make_rotation(chunks, *index_rope_);
    kv::Step step;
    for (const Chunk& chunk : chunks)
      step.begin(*chunk.cache, static_cast<std::int64_t>(chunk.tokens.size()));
    attention::Ran ran{};
    PassObserver* const observer = options.observer;
    const std::span<float> x(work_.x.data(), static_cast<std::size_t>(pass.rows * config_.hidden));
    const std::int64_t resumed = observer == nullptr ? 0 : observer->resume(x);
    for (auto i = static_cast<std::size_t>(resumed); i < layers_.size(); ++i) {
      const auto layer = static_cast<std::int64_t>(i);
      ran = config_.latent ? attend_latent(pass, layers_[i].attention, layer)
                           : attend(pass, layers_[i].attention, layer);
      feed_forward(pass, layers_[i].feed_forward);
      if (observer != nullptr) observer->finished(static_cast<std::int64_t>(i), x);
    }
    emit_logits(pass, on_logits);
    step.end();
    return ran;
  }

 private:
  // Of files of Llama 3.1 and later: what each frequency is divided by.
  void make_ropes(TensorTable& tensors, const TensorNames& names) {
    if (!names.rope_divisors.empty() && tensors.has(names.rope_divisors))
      config_.rope.divisors = tensors.vector(names.rope_divisors, config_.rope.rotary_dim / 2);
    try {
      rope_.emplace(config_.rope, config_.rope_layout);
      if (config_.indexer) index_rope_.emplace(config_.rope, config_.indexer->rope_layout);
      if (config_.local_rope) local_rope_.emplace(*config_.local_rope, config_.rope_layout);
    } catch (const Error& error) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: '{}': {}", tensors.where(), names.rope_divisors, error.what()));
    }
  }

  // What lies before and behind the layers.
  void bind_ends(TensorTable& tensors, const TensorNames& names, float norm_offset) {
    const ModelConfig& c = config_;
    embedding_ = tensors.matrix(names.embedding, c.vocabulary, c.hidden);
    output_norm_ = bind_norm(tensors, names.output_norm, c.hidden, norm_offset);
    head_ = embedding_;
    if (!c.tied_embeddings) {
      head_ = tensors.matrix(names.head, c.vocabulary, c.hidden);
    } else if (tensors.has(names.head)) {  // some files store the tied matrix twice
      const ops::WeightMatrix copy = tensors.matrix(names.head, c.vocabulary, c.hidden);
      if (copy.dtype != head_.dtype ||
          std::memcmp(copy.data, head_.data, static_cast<std::size_t>(copy.row_bytes() * copy.outputs)) !=
              0) {
        throw Error(ErrorCode::corrupt, fmt::format("{}: embeddings are tied, but '{}' differs from '{}'",
                                                    tensors.where(), names.head, names.embedding));
      }
    }
  }

  static std::int64_t stored_bytes(const ops::WeightMatrix& matrix) {
    return matrix.outputs == 0 ? 0 : matrix.outputs * matrix.row_bytes();
  }

  static std::int64_t stored_bytes(std::initializer_list<const Projection*> projections) {
    std::int64_t bytes = 0;
    for (const Projection* projection : projections) bytes += stored_bytes(projection->weight);
    return bytes;
  }

  // Of one token.
  std::int64_t layer_bytes(const Layer& layer) const {
    const AttentionWeights& attention = layer.attention;
    const FeedForwardWeights& feed_forward = layer.feed_forward;
    const auto mlp_bytes = [](const Mlp& mlp) { return stored_bytes({&mlp.gate, &mlp.up, &mlp.down}); };
    std::int64_t bytes =
        stored_bytes({&attention.q, &attention.k, &attention.v, &attention.o, &feed_forward.router});
    if (const auto& latent = attention.latent) {
      bytes += stored_bytes({&latent->q_a, &latent->q, &latent->kv_a, &latent->kv});
      if (latent->indexer)
        bytes += stored_bytes({&latent->indexer->q, &latent->indexer->k, &latent->indexer->weights});
    }
    if (feed_forward.shared) bytes += mlp_bytes(*feed_forward.shared);
    const bool is_dense = feed_forward.router.weight.outputs == 0;
    // Experts are alike.
    return bytes + (is_dense ? 1 : config_.chosen_experts) * mlp_bytes(feed_forward.experts.front());
  }

  // Which products are multiplied one after another, where that does not depend on what they give.
  void say_what_follows() {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      FeedForwardWeights& feed_forward = layers_[i].feed_forward;
      const bool is_dense = feed_forward.router.weight.outputs == 0;
      const Mlp& first = feed_forward.experts.front();
      layers_[i].attention.next = is_dense ? ops::NextMatrices{&first.gate.weight, &first.up.weight}
                                           : ops::NextMatrices{&feed_forward.router.weight};
      if (i + 1 == layers_.size()) {
        feed_forward.next = {&head_};
      } else if (const AttentionWeights& after = layers_[i + 1].attention; !after.latent) {
        feed_forward.next = {&after.q.weight, &after.k.weight, &after.v.weight};
      }
    }
  }

  static void check(std::span<const Chunk> chunks, const PassOptions& options) {
    if (chunks.empty()) throw Error(ErrorCode::internal, "a pass over no chunks");
    if (options.observer != nullptr && chunks.size() > 1)
      throw Error(ErrorCode::internal, "an observer of a pass over several chunks");
    for (const Chunk& chunk : chunks) {
      if (chunk.tokens.empty()) throw Error(ErrorCode::internal, "a chunk without tokens");
      const kv::Shape &shape = chunk.cache->full().shape(), &first = chunks.front().cache->full().shape();
      if (shape.dtype != first.dtype || shape.d_value != first.d_value)
        throw Error(ErrorCode::internal, "caches of different dtypes or forms in one pass");
    }
  }

  // Gives the number of rows.
  std::int64_t embed(std::span<const Chunk> chunks) {
    const auto scale = static_cast<float>(config_.embedding_scale);
    std::int64_t rows = 0;
    for (const Chunk& chunk : chunks) rows += static_cast<std::int64_t>(chunk.tokens.size());
    float* x = Workspace::floats(work_.x, rows * config_.hidden);
    for (const Chunk& chunk : chunks) {
      for (const std::int32_t token : chunk.tokens) {
        ops::widen_row(embedding_, token, x);
        if (scale != 1.0f)
          std::transform(x, x + config_.hidden, x, [&](float value) { return value * scale; });
        x += config_.hidden;
      }
    }
    return rows;
  }

  // Consecutive rows of one chunk, among those that are multiplied together.
  struct Run {
    std::size_t chunk;
    std::int64_t first_row, rows;
  };

  // The wanted rows of all chunks, kLogitRows at a time.
  void emit_logits(Pass& pass, const OnLogits& on_logits) {
    std::vector<Run> runs;
    std::int64_t filled = 0, begin = 0;
    for (std::size_t i = 0; i < pass.chunks.size(); ++i) {
      const auto tokens = static_cast<std::int64_t>(pass.chunks[i].tokens.size());
      const LogitsRows wanted = pass.chunks[i].rows;
      std::int64_t row = wanted == LogitsRows::all ? 0 : wanted == LogitsRows::last ? tokens - 1 : tokens;
      while (row < tokens) {
        const std::int64_t rows = std::min(kLogitRows - filled, tokens - row);
        ops::rms_norm(work_.x.data() + (begin + row) * config_.hidden, config_.hidden, output_norm_.data(),
                      static_cast<float>(config_.rms_norm_eps), work_.normed.data() + filled * config_.hidden,
                      config_.hidden, rows, config_.hidden, pass.pool);
        runs.push_back({i, row, rows});
        row += rows;
        filled += rows;
        if (filled < kLogitRows) continue;
        multiply_head(pass, runs, on_logits);
        runs.clear();
        filled = 0;
      }
      begin += tokens;
    }
    if (!runs.empty()) multiply_head(pass, runs, on_logits);
  }

  void multiply_head(Pass& pass, const std::vector<Run>& runs, const OnLogits& on_logits) {
    std::int64_t rows = 0;
    for (const Run& run : runs) rows += run.rows;
    float* logits = Workspace::floats(work_.logits, rows * config_.vocabulary);
    const ops::LinearOutput product{&head_, nullptr, logits, config_.vocabulary};
    ops::linear(work_.normed.data(), config_.hidden, rows, {&product, 1}, pass.options.compute, pass.pool);
    if (config_.logit_softcap > 0) {
      ops::softcap(logits, static_cast<float>(config_.logit_softcap), rows * config_.vocabulary, pass.pool);
    }
    for (const Run& run : runs) {
      const std::int64_t count = run.rows * config_.vocabulary;
      on_logits(run.chunk, run.first_row, run.rows, {logits, static_cast<std::size_t>(count)});
      logits += count;
    }
  }

  ModelConfig config_;
  std::shared_ptr<const void> owner_;
  std::optional<ops::Rope> rope_, local_rope_, index_rope_;  // the first always there
  ops::WeightMatrix embedding_, head_;
  std::vector<float> output_norm_;
  std::vector<Layer> layers_;
  std::int64_t parameters_ = 0, weight_bytes_ = 0;
  Workspace work_;
};

}  // namespace

std::unique_ptr<Model> make_decoder(const Architecture& architecture, Format format, ModelConfig config,
                                    TensorTable tensors, std::shared_ptr<const void> owner) {
  return std::make_unique<Decoder>(architecture, format, std::move(config), std::move(tensors),
                                   std::move(owner));
}

}  // namespace basin::models
