// What every decoder-only model gives the engine: its shape, and one pass over a chunk of tokens of some sequences.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "basin/attention/attention.h"
#include "basin/base/thread_pool.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "ops/rope.h"

namespace basin::text {
class Tokenizer;
}
namespace basin::kv {
class SequenceCache;
}

namespace basin::models {

/// What stands between the gate and up products of a feed-forward part and its down product.
enum class Activation {
  silu,            // silu(gate) up
  gelu_tanh,       // gelu(gate) up, gelu in its tanh form
  swiglu_clamped,  // gate sigmoid(1.702 gate) (up + 1), both limited to activation_limit, up from below as well
};

/// Multi-head latent attention: each token has one latent, and keys and values of every head are products of it. Kept are either
/// the latents, with the products moved over to queries and output ("absorbed"), or keys and values themselves ("expanded").
struct LatentAttention {
  std::int64_t q_rank = 0;  // of the queries' latent; 0: they have none
  std::int64_t kv_rank = 0;
  std::int64_t d_nope = 0, d_rope = 0,
               d_v = 0;  // of a head: without rotation, rotated (one for all heads), values

  std::int64_t d_qk() const { return d_nope + d_rope; }
  std::int64_t latent() const { return kv_rank + d_rope; }  // the one key of the absorbed form
};

/// DeepSeek Sparse Attention: a small attention of its own that chooses the keys a query sees (basin/attention/selection.h).
struct IndexerConfig {
  std::int64_t heads = 0, d_head = 0, topk = 0;
  ops::RopeLayout rope_layout = ops::RopeLayout::half;
  std::vector<bool> shared;  // [layers] takes the selection of the last layer before it that is not shared
};

/// Experts of DeepSeek-V3, beside `experts` and `chosen_experts`.
struct GroupedExperts {
  std::int64_t intermediate = 0;  // of one expert
  std::int64_t shared = 0;        // experts that every token goes to
  ops::GroupedChoice choice;
  std::vector<bool> dense;  // [layers] no experts but one feed-forward part
};

/// How one layer attends, before any request's streaming window.
struct LayerAttention {
  std::int64_t window = 0;  // keys visible including self; 0 = all
  bool sink_logit = false;
};

struct ModelConfig {
  std::string architecture;  // "llama", "qwen3", ...
  std::int64_t vocabulary = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;  // of the feed-forward part, or of one expert
  std::int64_t experts = 0,
               chosen_experts =
                   0;  // of each layer, and of them for each token; 0 = one feed-forward part for all
  Activation activation = Activation::silu;
  double activation_limit = 7.0;  // for swiglu_clamped
  std::optional<GroupedExperts> grouped;
  std::optional<LatentAttention> latent;
  std::optional<IndexerConfig> indexer;
  std::int64_t h_q = 0, h_kv = 0, d_head = 0;
  std::int64_t context = 0;  // trained context, in tokens
  double rms_norm_eps = 0.0;
  bool tied_embeddings = false;
  double embedding_scale = 1.0;
  double attention_scale = 1.0;    // multiplies q.k
  double attention_softcap = 0.0;  // 0 = off
  double logit_softcap = 0.0;      // of the model's output; 0 = off
  ops::RopeConfig rope;
  std::optional<ops::RopeConfig> local_rope;  // of layers with a window, where it is another
  ops::RopeLayout rope_layout = ops::RopeLayout::half;
  std::vector<LayerAttention> layers;  // [layer count]
  std::int64_t extra_layers = 0;  // of the file behind these, which predict further tokens and are not read
};

/// Which rows of logits a pass produces of a chunk.
enum class LogitsRows { none, last, all };

/// The next tokens of one sequence, which stand at cache->logical_position() and on.
struct Chunk {
  std::span<const std::int32_t> tokens;  // [t], at least one
  kv::SequenceCache* cache = nullptr;    // not null
  LogitsRows rows = LogitsRows::all;
};

/// Looks into a pass over one chunk, layer by layer: for those who study attention. What it is given lives until it returns.
class PassObserver {
 public:
  virtual ~PassObserver() = default;
  /// Before the first layer. Layers below the returned number are not run: `x` [tokens, hidden], the residual stream, is
  /// then what the observer wrote into it. The cache lacks those layers, so nothing may be read after such a pass.
  virtual std::int64_t resume(std::span<float> x) = 0;
  /// After a layer's attention: the problem as it ran, with lse and lse_with_sink and keys on pages.
  virtual void attended(std::int64_t layer, const attention::Forward& problem, ThreadPool& pool) = 0;
  /// Instead, where an indexer chose what the chunk's queries see: `indices` [tokens, topk], ascending, padded with -1, and
  /// the problem as it ran, whose lse is over these keys.
  virtual void selected(std::int64_t /*layer*/, std::span<const std::int32_t> /*indices*/,
                        const attention::Forward& /*problem*/, ThreadPool& /*pool*/) {}
  /// After the whole layer.
  virtual void finished(std::int64_t layer, std::span<const float> x) = 0;
};

/// What is asked of a model's indexers beside what they have learned.
struct IndexOptions {
  bool fp8 = false;  // score as servers do: queries and keys through a Hadamard transform to fp8
  // Selected whatever their scores, in places of the topk: the first keys that a query sees, and the last, self included.
  std::int64_t sink_tokens = 0, window = 0;
  bool operator==(const IndexOptions&) const = default;
};

struct PassOptions {
  ops::Compute compute = ops::Compute::fast;
  attention::Backend attention_backend = attention::Backend::automatic;
  PassObserver* observer = nullptr;  // may be null; for passes over one chunk
  IndexOptions index = {};           // of models with indexers
};

/// `chunk` is an index into the pass's chunks; `first_row` counts from that chunk's first token.
using OnLogits = std::function<void(std::size_t chunk, std::int64_t first_row, std::int64_t rows,
                                    std::span<const float> logits)>;

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  virtual std::int64_t parameters() const = 0;
  virtual std::int64_t weight_bytes() const = 0;
  /// Of the matrices that a pass over one token multiplies: without the embedding table, unless that is the output matrix too, and
  /// without the experts that the token does not go to.
  virtual std::int64_t token_weight_bytes() const = 0;

  /// Reads the next chunk of every sequence given: appends keys and values to each cache, and hands the wanted logits to
  /// `on_logits` in runs of consecutive rows [rows, vocabulary] (float32), so that they are never all in memory. A cache
  /// decides what its sequence sees and at which positions; all are of one dtype, and none is given twice. Products run
  /// over the rows of all chunks at once, and every row has the bits that it would have alone. Returns what attention
  /// ran. When it throws, or `on_logits` does, all caches are as they were before.
  virtual attention::Ran forward(std::span<const Chunk> chunks, const PassOptions& options,
                                 const OnLogits& on_logits, ThreadPool& pool) = 0;
};

/// What a MODEL argument names: a directory in the Hugging Face layout, a .gguf file, or a .safetensors file
/// beside its config.json.
struct Loaded {
  std::unique_ptr<Model> model;                      // not null
  std::shared_ptr<const text::Tokenizer> tokenizer;  // null when the checkpoint has none (test models)
  std::string chat_template;                         // may be empty
};

/// Throws Error(not_found | corrupt | unsupported | io). Every tensor is consumed or refused by name.
Loaded load(const std::filesystem::path& path);

/// Names of the supported architectures, for messages.
std::string supported_architectures();

}  // namespace basin::models
