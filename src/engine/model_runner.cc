#include "engine/model_runner.h"

#include <algorithm>
#include <vector>

namespace basin::engine {

kv::Shape cache_shape(const models::ModelConfig& config, ops::Compute compute, std::int64_t page_tokens) {
  kv::Shape shape;
  shape.layers = std::ranges::count(config.layers, std::int64_t{0}, &models::LayerAttention::window);
  shape.h_kv = config.h_kv;
  shape.d_head = config.d_head;
  shape.dtype = compute == ops::Compute::fp32 ? DType::f32 : DType::bf16;
  shape.page_tokens = page_tokens;
  return shape;
}

kv::SequenceCache make_cache(const models::ModelConfig& config, std::shared_ptr<kv::PagePool> pool,
                             const kv::Policy& policy) {
  std::vector<std::int64_t> windows;
  for (const models::LayerAttention& layer : config.layers) windows.push_back(layer.window);
  return {std::move(pool), policy, windows};
}

ModelRunner::ModelRunner(models::Model& model, ThreadPool& threads, ops::Compute compute,
                         std::int64_t page_tokens, std::int64_t pages)
    : model_(model),
      threads_(threads),
      compute_(compute),
      pool_(std::make_shared<kv::PagePool>(cache_shape(model.config(), compute, page_tokens), pages)) {}

kv::SequenceCache ModelRunner::make_cache(const kv::Policy& policy) const {
  return engine::make_cache(model_.config(), pool_, policy);
}

void ModelRunner::run(std::span<const RunnerWork> work, const OnLogits& on_logits) {
  std::vector<models::Chunk> chunks;
  for (const RunnerWork& each : work) chunks.push_back({each.tokens, each.cache, each.rows});
  model_.forward(chunks, {compute_, attention::Backend::automatic, nullptr}, on_logits, threads_);
}

}  // namespace basin::engine
