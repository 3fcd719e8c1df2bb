#include "engine/model_runner.h"

#include <vector>

#include "models/cache.h"

namespace basin::engine {

ModelRunner::ModelRunner(models::Model& model, ThreadPool& threads, ops::Compute compute,
                         std::int64_t page_tokens, std::int64_t pages)
    : model_(model),
      threads_(threads),
      compute_(compute),
      pool_(
          std::make_shared<kv::PagePool>(models::cache_shape(model.config(), compute, page_tokens), pages)) {}

kv::SequenceCache ModelRunner::make_cache(const kv::Policy& policy) const {
  return models::make_cache(model_.config(), pool_, policy);
}

void ModelRunner::run(std::span<const RunnerWork> work, const OnLogits& on_logits) {
  std::vector<models::Chunk> chunks;
  for (const RunnerWork& each : work) chunks.push_back({each.tokens, each.cache, each.rows});
  model_.forward(chunks, {compute_, attention::Backend::automatic, nullptr}, on_logits, threads_);
}

}  // namespace basin::engine
