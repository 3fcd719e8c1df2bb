// Computes passes for the serving engine. The one place below it that knows a device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "kv/sequence_cache.h"
#include "models/model.h"

namespace basin::engine {

/// The next tokens of one sequence.
struct RunnerWork {
  kv::SequenceCache* cache = nullptr;    // not null; says which pages, which mask and which positions
  std::span<const std::int32_t> tokens;  // not empty
  models::LogitsRows rows = models::LogitsRows::last;
};

class Runner {
 public:
  virtual ~Runner() = default;

  virtual std::int64_t vocabulary() const = 0;
  /// Where the caches of all sequences live. The pages of full attention are what a schedule counts; those of layers with a
  /// window of their own are few for each sequence, and there are enough for all that may run.
  virtual std::span<const kv::LayerKind> kinds() const = 0;
  kv::PagePool& pool() const { return *kinds().front().pool; }
  /// An empty cache for one sequence.
  virtual kv::SequenceCache make_cache(const kv::Policy& policy) const = 0;

  /// Computes one pass: every cache has its tokens then, and the wanted rows [rows, vocabulary] of work `index` were handed to
  /// `on_logits`, in order; `first_row` counts from the work's first token. The result for a sequence does not depend on the
  /// others, to the bit. May throw, and then some caches have their tokens and others do not.
  using OnLogits = std::function<void(std::size_t index, std::int64_t first_row, std::int64_t rows,
                                      std::span<const float> logits)>;
  virtual void run(std::span<const RunnerWork> work, const OnLogits& on_logits) = 0;
};

}  // namespace basin::engine
