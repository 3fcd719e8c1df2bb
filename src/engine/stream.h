// One sequence that is read token by token or in chunks, in bounded memory when a window is set.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "basin/attention/attention.h"
#include "basin/base/thread_pool.h"
#include "kv/sequence_cache.h"
#include "models/cache.h"
#include "models/model.h"
#include "ops/linear.h"

namespace basin::engine {

enum class PositionMode {
  in_cache,  // sink keys are seen at the distance of kept tokens (StreamingLLM); the default
  absolute,  // every key keeps the position it was written with
};

struct StreamOptions {
  std::int64_t sink_tokens = 0;        // >= 0; needs `window`
  std::optional<std::int64_t> window;  // >= 1 recent tokens including self; absent = unlimited
  PositionMode positions = PositionMode::in_cache;
  std::int64_t chunk_tokens = 512;  // >= 1, most tokens in one pass
  std::int64_t page_tokens = 16;    // >= 1
  ops::Compute compute = ops::Compute::fast;
  attention::Backend attention_backend = attention::Backend::automatic;
  models::LatentForm latent = models::LatentForm::absorbed;  // of models with latent attention
  models::IndexOptions index;                                // of models with indexers
};

/// Throws Error(invalid_argument | unsupported) with a hint: window 0, sink tokens without a window,
/// sink_tokens + window beyond the trained context in in-cache mode, RoPE that changes with length, ...
void check(const StreamOptions& options, const models::ModelConfig& config);

/// What a pass of such a stream is asked for.
models::PassOptions pass_options(const StreamOptions& options);

/// An empty cache for one sequence of a model. The request's window acts on the layers with full attention; layers with a
/// window of their own keep that.
kv::SequenceCache make_cache(const StreamOptions& options, const models::ModelConfig& config);

/// Of the layers with full attention: the numbers that other engines confuse; none is derived by clamping another.
struct StreamLengths {
  std::int64_t logical_position = 0;  // tokens seen
  std::int64_t cache_position = 0;    // index among kept tokens of the next token (in-cache mode)
  std::int64_t write_slot = 0;        // physical row of the next token
  std::int64_t kept_tokens = 0;       // rows physically held
  std::int64_t attention_tokens = 0;  // rows the next query would read
  std::int64_t ring_offset = 0;       // first kept recent token minus the start of its page
};

struct StreamReport {
  std::int64_t kept_tokens_max =
      0;                          // most rows visible to one query so far, in the layers with full attention
  std::int64_t kv_bytes_max = 0;  // peak of allocated pages, of all layers together
  const char* attention_backend = "";
  const char* attention_target = "";
};

class Stream {
 public:
  /// `model` and `pool` must outlive the stream.
  Stream(models::Model& model, const StreamOptions& options, ThreadPool& pool);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Called for runs of consecutive rows: `logits` holds `rows` rows [rows, vocabulary] for the tokens with logical positions
  /// first_position .. first_position + rows - 1. Returning false stops the feed after the running chunk.
  using OnLogits =
      std::function<bool(std::int64_t first_position, std::int64_t rows, std::span<const float> logits)>;

  /// Reads tokens in chunks. With LogitsRows::last only the very last token's row is produced. Throws
  /// Error(invalid_argument) before reading anything when the text would pass the trained context without a
  /// window, or an id is outside the vocabulary. When the model or `on_logits` throws, the running chunk is unread and
  /// those before it are read: the stream goes on from there.
  void feed(std::span<const std::int32_t> tokens, models::LogitsRows rows, const OnLogits& on_logits);

  /// Whether `tokens` more tokens can be fed: always with a window, else up to the trained context.
  bool has_room(std::int64_t tokens) const;
  /// Throws the Error(invalid_argument) that feeding so many more tokens would throw.
  void check_room(std::int64_t tokens) const;

  /// Throws Error(invalid_argument) naming an id outside the vocabulary.
  void check_ids(std::span<const std::int32_t> tokens) const;

  ThreadPool& pool() const;
  std::span<const std::int32_t> token_history() const;  // all token ids, never cut
  StreamLengths lengths() const;
  StreamReport report() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace basin::engine
