// A runner on the CPU: a model, its threads, and pages in host memory.
#pragma once

#include "basin/base/thread_pool.h"
#include "engine/runner.h"
#include "engine/stream.h"

namespace basin::engine {

class ModelRunner : public Runner {
 public:
  struct Limits {
    std::int64_t page_tokens = 16, pages = 0;  // of full attention
    std::int64_t max_sequences = 1, max_batch_tokens = 512;
  };
  /// `model` and `threads` must outlive the runner.
  ModelRunner(models::Model& model, ThreadPool& threads, const models::PassOptions& options,
              const Limits& limits);

  std::int64_t vocabulary() const override { return model_.config().vocabulary; }
  std::span<const kv::LayerKind> kinds() const override { return kinds_; }
  kv::SequenceCache make_cache(const kv::Policy& policy) const override;
  void run(std::span<const RunnerWork> work, const OnLogits& on_logits) override;

 private:
  models::Model& model_;
  ThreadPool& threads_;
  models::PassOptions options_;
  std::vector<std::int64_t> windows_;
  std::vector<kv::LayerKind> kinds_;
};

}  // namespace basin::engine
