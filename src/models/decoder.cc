#include "models/decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "basin/base/error.h"
#include "kv/cache.h"
#include "ops/elementwise.h"

namespace basin::models {
namespace {

// Rows of logits that are in memory at a time: 64 rows of a 150,000 word vocabulary are 38 MB.
constexpr std::int64_t kLogitRows = 64;

struct Layer {
  std::vector<float> attention_norm, mlp_norm;  // [hidden]
  std::vector<float> q_norm, k_norm;            // [d_head]; empty without qk_norm
  ops::WeightMatrix q, k, v, o, gate, up, down;
};

// Activations of one pass, kept from pass to pass so that a decode step allocates nothing.
struct Workspace {
  std::vector<float> x, normed, q, k, v, attended, gate, up, logits;
  std::vector<float> lse, lse_with_sink;  // for observers only
  std::vector<std::byte> q_rotated, q_sink_rotated;

  static float* floats(std::vector<float>& buffer, std::int64_t count) {
    if (static_cast<std::int64_t>(buffer.size()) < count) buffer.resize(static_cast<std::size_t>(count));
    return buffer.data();
  }
  static std::byte* bytes(std::vector<std::byte>& buffer, std::int64_t count) {
    if (static_cast<std::int64_t>(buffer.size()) < count) buffer.resize(static_cast<std::size_t>(count));
    return buffer.data();
  }
};

// Rotations of one pass: keys and recent-key queries at logical positions, and queries for sink keys where they differ.
struct Rotations {
  ops::RopeTable logical;
  ops::RopeTable sink;  // no tokens when the two coincide
};

class Decoder : public Model {
 public:
  Decoder(const Architecture& architecture, ModelConfig config, TensorTable tensors, const TensorNames& names,
          std::shared_ptr<const void> owner)
      : config_(std::move(config)), owner_(std::move(owner)), rope_(config_.rope, config_.rope_layout) {
    bind(architecture, tensors, names);
    tensors.refuse_unused();
    parameters_ = tensors.parameters();
    weight_bytes_ = tensors.weight_bytes();
  }

  const ModelConfig& config() const override { return config_; }
  std::int64_t parameters() const override { return parameters_; }
  std::int64_t weight_bytes() const override { return weight_bytes_; }

  attention::Ran forward(const Chunk& chunk, kv::Cache& cache, const PassOptions& options,
                         const OnLogits& on_logits, ThreadPool& pool) override {
    const auto tokens = static_cast<std::int64_t>(chunk.tokens.size());
    embed(chunk.tokens);
    const Rotations rotations = rotate_tables(chunk, cache.policy());
    kv::Step step(cache, tokens);
    attention::Ran ran{};
    PassObserver* const observer = options.observer;
    const std::span<float> x(work_.x.data(), static_cast<std::size_t>(tokens * config_.hidden));
    const std::int64_t resumed = observer == nullptr ? 0 : observer->resume(x);
    for (auto i = static_cast<std::size_t>(resumed); i < layers_.size(); ++i) {
      ran = attend(static_cast<std::int64_t>(i), tokens, rotations, cache, options, pool);
      feed_forward(layers_[i], tokens, options.compute, pool);
      if (observer != nullptr) observer->finished(static_cast<std::int64_t>(i), x);
    }
    const std::int64_t first = options.rows == LogitsRows::all    ? 0
                               : options.rows == LogitsRows::last ? tokens - 1
                                                                  : tokens;
    emit_logits(first, tokens, options.compute, on_logits, pool);
    step.end();
    return ran;
  }

 private:
  void bind(const Architecture& architecture, TensorTable& tensors, const TensorNames& names) {
    const ModelConfig& c = config_;
    embedding_ = tensors.matrix(names.embedding, c.vocabulary, c.hidden);
    output_norm_ = tensors.vector(names.output_norm, c.hidden);
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
    for (std::size_t i = 0; i < c.layers.size(); ++i) {
      const std::string prefix = fmt::format("{}{}.", names.layer_prefix, i);
      Layer layer;
      layer.attention_norm = tensors.vector(prefix + names.attention_norm, c.hidden);
      layer.q = tensors.matrix(prefix + names.q, c.h_q * c.d_head, c.hidden);
      layer.k = tensors.matrix(prefix + names.k, c.h_kv * c.d_head, c.hidden);
      layer.v = tensors.matrix(prefix + names.v, c.h_kv * c.d_head, c.hidden);
      layer.o = tensors.matrix(prefix + names.o, c.hidden, c.h_q * c.d_head);
      if (architecture.qk_norm) {
        layer.q_norm = tensors.vector(prefix + names.q_norm, c.d_head);
        layer.k_norm = tensors.vector(prefix + names.k_norm, c.d_head);
      }
      layer.mlp_norm = tensors.vector(prefix + names.mlp_norm, c.hidden);
      layer.gate = tensors.matrix(prefix + names.gate, c.intermediate, c.hidden);
      layer.up = tensors.matrix(prefix + names.up, c.intermediate, c.hidden);
      layer.down = tensors.matrix(prefix + names.down, c.hidden, c.intermediate);
      layers_.push_back(std::move(layer));
    }
  }

  void embed(std::span<const std::int32_t> tokens) {
    float* x = Workspace::floats(work_.x, static_cast<std::int64_t>(tokens.size()) * config_.hidden);
    for (const std::int32_t token : tokens) {
      ops::widen_row(embedding_, token, x);
      x += config_.hidden;
    }
  }

  Rotations rotate_tables(const Chunk& chunk, const kv::Policy& policy) const {
    std::vector<std::int64_t> logical(chunk.tokens.size()), sink(chunk.tokens.size());
    const std::int64_t last_cache_position = policy.sink_tokens + policy.window - 1;
    bool differ = false;
    for (std::size_t t = 0; t < logical.size(); ++t) {
      logical[t] = chunk.logical_position + static_cast<std::int64_t>(t);
      sink[t] = std::min(logical[t], last_cache_position);
      differ = differ || sink[t] != logical[t];
    }
    Rotations rotations;
    rotations.logical = rope_.table(logical);
    if (policy.in_cache_positions && policy.sink_tokens > 0 && differ) rotations.sink = rope_.table(sink);
    return rotations;
  }

  // x += W_o attention(rope(W_q n), rope(W_k n), W_v n) with n = norm(x).
  attention::Ran attend(std::int64_t index, std::int64_t tokens, const Rotations& rotations, kv::Cache& cache,
                        const PassOptions& options, ThreadPool& pool) {
    const ModelConfig& c = config_;
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    const std::int64_t q_width = c.h_q * c.d_head, kv_width = c.h_kv * c.d_head;
    float* normed = Workspace::floats(work_.normed, tokens * c.hidden);
    float* q = Workspace::floats(work_.q, tokens * q_width);
    float* k = Workspace::floats(work_.k, tokens * kv_width);
    float* v = Workspace::floats(work_.v, tokens * kv_width);
    const auto eps = static_cast<float>(c.rms_norm_eps);
    ops::rms_norm(work_.x.data(), c.hidden, layer.attention_norm.data(), eps, normed, c.hidden, tokens,
                  c.hidden, pool);
    const ops::LinearOutput products[] = {
        {&layer.q, nullptr, q, q_width}, {&layer.k, nullptr, k, kv_width}, {&layer.v, nullptr, v, kv_width}};
    ops::linear(normed, c.hidden, tokens, products, options.compute, pool);
    if (!layer.q_norm.empty()) {
      ops::rms_norm(q, c.d_head, layer.q_norm.data(), eps, q, c.d_head, tokens * c.h_q, c.d_head, pool);
      ops::rms_norm(k, c.d_head, layer.k_norm.data(), eps, k, c.d_head, tokens * c.h_kv, c.d_head, pool);
    }

    const DType dtype = cache.shape().dtype;
    const auto view = [&](auto* data, DType type, std::int64_t heads) {
      return contiguous(data, type, {tokens, heads, c.d_head});
    };
    const std::int64_t q_bytes = tokens * q_width * block_bytes(dtype);
    void* q_rotated = Workspace::bytes(work_.q_rotated, q_bytes);
    const ConstView q_in = view(static_cast<const void*>(q), DType::f32, c.h_q);
    rope_.rotate(q_in, rotations.logical, view(q_rotated, dtype, c.h_q), pool);
    rope_.rotate(view(static_cast<const void*>(k), DType::f32, c.h_kv), rotations.logical,
                 view(static_cast<void*>(k), DType::f32, c.h_kv), pool);
    cache.append(index, k, v);

    attention::Forward problem;
    problem.spec.mask = cache.mask();
    problem.spec.scale = 1.0 / std::sqrt(static_cast<double>(c.d_head));
    attention::Sequence sequence;
    sequence.q_tokens = tokens;
    sequence.kv_tokens = cache.logical_position() + tokens;
    sequence.pages = cache.pages();
    problem.sequences = {&sequence, 1};
    problem.q = view(static_cast<const void*>(q_rotated), dtype, c.h_q);
    if (rotations.sink.tokens > 0) {
      void* q_sink = Workspace::bytes(work_.q_sink_rotated, q_bytes);
      rope_.rotate(q_in, rotations.sink, view(q_sink, dtype, c.h_q), pool);
      problem.q_sink = view(static_cast<const void*>(q_sink), dtype, c.h_q);
    }
    problem.k = cache.keys(index);
    problem.v = cache.values(index);
    float* attended = Workspace::floats(work_.attended, tokens * q_width);
    problem.out = view(static_cast<void*>(attended), DType::f32, c.h_q);
    if (options.observer != nullptr) {
      problem.lse = Workspace::floats(work_.lse, tokens * c.h_q);
      problem.lse_with_sink = Workspace::floats(work_.lse_with_sink, tokens * c.h_q);
    }
    const attention::Ran ran = attention::forward(problem, options.attention_backend, pool);
    if (options.observer != nullptr) options.observer->attended(index, problem, pool);
    add_product(attended, q_width, layer.o, tokens, options.compute, pool);
    return ran;
  }

  // x += W_down (silu(W_gate n) * W_up n) with n = norm(x).
  void feed_forward(const Layer& layer, std::int64_t tokens, ops::Compute compute, ThreadPool& pool) {
    const ModelConfig& c = config_;
    float* normed = Workspace::floats(work_.normed, tokens * c.hidden);
    float* gate = Workspace::floats(work_.gate, tokens * c.intermediate);
    float* up = Workspace::floats(work_.up, tokens * c.intermediate);
    ops::rms_norm(work_.x.data(), c.hidden, layer.mlp_norm.data(), static_cast<float>(c.rms_norm_eps), normed,
                  c.hidden, tokens, c.hidden, pool);
    const ops::LinearOutput products[] = {{&layer.gate, nullptr, gate, c.intermediate},
                                          {&layer.up, nullptr, up, c.intermediate}};
    ops::linear(normed, c.hidden, tokens, products, compute, pool);
    ops::silu_multiply(gate, up, gate, tokens, c.intermediate, pool);
    add_product(gate, c.intermediate, layer.down, tokens, compute, pool);
  }

  // x += W input.
  void add_product(const float* input, std::int64_t width, const ops::WeightMatrix& weight,
                   std::int64_t tokens, ops::Compute compute, ThreadPool& pool) {
    float* result = work_.normed.data();  // free by now, and as large as x
    const ops::LinearOutput product{&weight, nullptr, result, config_.hidden};
    ops::linear(input, width, tokens, {&product, 1}, compute, pool);
    ops::add(work_.x.data(), result, tokens * config_.hidden, pool);
  }

  void emit_logits(std::int64_t first, std::int64_t tokens, ops::Compute compute, const OnLogits& on_logits,
                   ThreadPool& pool) {
    const ModelConfig& c = config_;
    for (std::int64_t row = first; row < tokens; row += kLogitRows) {
      const std::int64_t rows = std::min(kLogitRows, tokens - row);
      float* normed = work_.normed.data();
      ops::rms_norm(work_.x.data() + row * c.hidden, c.hidden, output_norm_.data(),
                    static_cast<float>(c.rms_norm_eps), normed, c.hidden, rows, c.hidden, pool);
      float* logits = Workspace::floats(work_.logits, rows * c.vocabulary);
      const ops::LinearOutput product{&head_, nullptr, logits, c.vocabulary};
      ops::linear(normed, c.hidden, rows, {&product, 1}, compute, pool);
      on_logits(row, rows, {logits, static_cast<std::size_t>(rows * c.vocabulary)});
    }
  }

  ModelConfig config_;
  std::shared_ptr<const void> owner_;
  ops::Rope rope_;
  ops::WeightMatrix embedding_, head_;
  std::vector<float> output_norm_;
  std::vector<Layer> layers_;
  std::int64_t parameters_ = 0, weight_bytes_ = 0;
  Workspace work_;
};

}  // namespace

const TensorNames& hugging_face_names() {
  static const TensorNames names{
      .embedding = "model.embed_tokens.weight",
      .output_norm = "model.norm.weight",
      .head = "lm_head.weight",
      .layer_prefix = "model.layers.",
      .attention_norm = "input_layernorm.weight",
      .q = "self_attn.q_proj.weight",
      .k = "self_attn.k_proj.weight",
      .v = "self_attn.v_proj.weight",
      .o = "self_attn.o_proj.weight",
      .q_norm = "self_attn.q_norm.weight",
      .k_norm = "self_attn.k_norm.weight",
      .mlp_norm = "post_attention_layernorm.weight",
      .gate = "mlp.gate_proj.weight",
      .up = "mlp.up_proj.weight",
      .down = "mlp.down_proj.weight",
  };
  return names;
}

const TensorNames& gguf_names() {
  static const TensorNames names{
      .embedding = "token_embd.weight",
      .output_norm = "output_norm.weight",
      .head = "output.weight",
      .layer_prefix = "blk.",
      .attention_norm = "attn_norm.weight",
      .q = "attn_q.weight",
      .k = "attn_k.weight",
      .v = "attn_v.weight",
      .o = "attn_output.weight",
      .q_norm = "attn_q_norm.weight",
      .k_norm = "attn_k_norm.weight",
      .mlp_norm = "ffn_norm.weight",
      .gate = "ffn_gate.weight",
      .up = "ffn_up.weight",
      .down = "ffn_down.weight",
  };
  return names;
}

std::unique_ptr<Model> make_decoder(const Architecture& architecture, ModelConfig config, TensorTable tensors,
                                    const TensorNames& names, std::shared_ptr<const void> owner) {
  return std::make_unique<Decoder>(architecture, std::move(config), std::move(tensors), names,
                                   std::move(owner));
}

}  // namespace basin::models
