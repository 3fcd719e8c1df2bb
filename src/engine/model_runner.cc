#include "engine/model_runner.h"

#include <vector>

#include "models/cache.h"

namespace basin::engine {

ModelRunner::ModelRunner(models::Model& model, ThreadPool& threads, const models::PassOptions& options,
                         const Limits& limits)
    : model_(model), threads_(threads), options_(options), windows_(models::layer_windows(model.config())) {
  kinds_ =
      kv::layer_kinds(windows_, models::cache_shape(model.config(), options.compute, limits.page_tokens));
  for (kv::LayerKind& kind : kinds_) {
    // Of a window's pages as many are kept for prefixes as all sequences together may hold.
    const std::int64_t pages =
        kind.window == 0 ? limits.pages
                         : 2 * limits.max_sequences *
                               kv::page_bound(kind.policy({}), limits.page_tokens, limits.max_batch_tokens);
    kind.pool = std::make_shared<kv::PagePool>(kind.pool->shape(), std::min(pages, kv::PagePool::kUnlimited));
  }
}

kv::SequenceCache ModelRunner::make_cache(const kv::Policy& policy) const {
  return {kinds_, policy, windows_};
}

void ModelRunner::run(std::span<const RunnerWork> work, const OnLogits& on_logits) {
  std::vector<models::Chunk> chunks;
  for (const RunnerWork& each : work) chunks.push_back({each.tokens, each.cache, each.rows});
  model_.forward(chunks, options_, on_logits, threads_);
}

}  // namespace basin::engine
