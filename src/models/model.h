// What every decoder-only model gives the engine: its shape, and one pass over a chunk of tokens.
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
#include "ops/rope.h"

namespace basin::text {
class Tokenizer;
}
namespace basin::kv {
class Cache;
}

namespace basin::models {

/// How one layer attends, before any request's streaming window.
struct LayerAttention {
  std::int64_t window = 0;  // keys visible including self; 0 = all
  bool sink_logit = false;
};

struct ModelConfig {
  std::string architecture;  // "llama", "qwen3"
  std::int64_t vocabulary = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t h_q = 0, h_kv = 0, d_head = 0;
  std::int64_t context = 0;  // trained context, in tokens
  double rms_norm_eps = 0.0;
  bool tied_embeddings = false;
  ops::RopeConfig rope;
  ops::RopeLayout rope_layout = ops::RopeLayout::half;
  std::vector<LayerAttention> layers;  // [layer count]
};

/// One chunk of one sequence.
struct Chunk {
  std::span<const std::int32_t> tokens;  // [t], consecutive
  std::int64_t logical_position = 0;     // of tokens[0]
};

/// Which rows of logits a pass produces.
enum class LogitsRows { none, last, all };

/// Looks into a pass layer by layer: for those who study attention. What it is given lives until it returns.
class PassObserver {
 public:
  virtual ~PassObserver() = default;
  /// Before the first layer. Layers below the returned number are not run: `x` [tokens, hidden], the residual stream, is
  /// then what the observer wrote into it. The cache lacks those layers, so nothing may be read after such a pass.
  virtual std::int64_t resume(std::span<float> x) = 0;
  /// After a layer's attention: the problem as it ran, with lse and lse_with_sink and keys on pages.
  virtual void attended(std::int64_t layer, const attention::Forward& problem, ThreadPool& pool) = 0;
  /// After the whole layer.
  virtual void finished(std::int64_t layer, std::span<const float> x) = 0;
};

struct PassOptions {
  ops::Compute compute = ops::Compute::fast;
  attention::Backend attention_backend = attention::Backend::automatic;
  LogitsRows rows = LogitsRows::all;
  PassObserver* observer = nullptr;  // may be null
};

/// `first_row` counts from the chunk's first token.
using OnLogits =
    std::function<void(std::int64_t first_row, std::int64_t rows, std::span<const float> logits)>;

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  virtual std::int64_t parameters() const = 0;
  virtual std::int64_t weight_bytes() const = 0;

  /// Appends the chunk's keys and values to `cache` and hands the wanted logits to `on_logits` in runs of consecutive
  /// rows [rows, vocabulary] (float32), so that they are never all in memory. `cache` decides what is visible and at
  /// which positions. Returns what attention ran. When it throws, or `on_logits` does, `cache` is as it was before.
  virtual attention::Ran forward(const Chunk& chunk, kv::Cache& cache, const PassOptions& options,
                                 const OnLogits& on_logits, ThreadPool& pool) = 0;
};

/// What a MODEL argument names: a directory in the Hugging Face layout, a .gguf file, or a .safetensors file
/// beside its config.json.
struct Loaded {
  std::unique_ptr<Model> model;                      // not null
  std::shared_ptr<const text::Tokenizer> tokenizer;  // null when the checkpoint has none (test models)
  std::string default_system;  // system message the chat template puts first, may be empty
};

/// Throws Error(not_found | corrupt | unsupported | io). Every tensor is consumed or refused by name.
Loaded load(const std::filesystem::path& path);

/// Names of the supported architectures, for messages.
std::string supported_architectures();

}  // namespace basin::models
