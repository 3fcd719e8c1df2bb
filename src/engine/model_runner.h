// A runner on the CPU: a model, its threads, and pages in host memory.
#pragma once

#include "basin/base/thread_pool.h"
#include "engine/runner.h"
#include "engine/stream.h"

namespace basin::engine {

class ModelRunner : public Runner {
 public:
  /// `model` and `threads` must outlive the runner.
  ModelRunner(models::Model& model, ThreadPool& threads, ops::Compute compute, std::int64_t page_tokens,
              std::int64_t pages);

  std::int64_t vocabulary() const override { return model_.config().vocabulary; }
  const std::shared_ptr<kv::PagePool>& pool() const override { return pool_; }
  kv::SequenceCache make_cache(const kv::Policy& policy) const override;
  void run(std::span<const RunnerWork> work, const OnLogits& on_logits) override;

 private:
  models::Model& model_;
  ThreadPool& threads_;
  ops::Compute compute_;
  std::shared_ptr<kv::PagePool> pool_;
};

}  // namespace basin::engine
