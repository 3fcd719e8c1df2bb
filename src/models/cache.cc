#include "models/cache.h"

#include <algorithm>
#include <vector>

namespace basin::models {

kv::Shape cache_shape(const ModelConfig& config, ops::Compute compute, std::int64_t page_tokens,
                      LatentForm form) {
  kv::Shape shape;
  shape.layers = std::ranges::count(config.layers, std::int64_t{0}, &LayerAttention::window);
  shape.h_kv = config.h_kv;
  shape.d_head = config.d_head;
  shape.dtype = compute == ops::Compute::fp32 ? DType::f32 : DType::bf16;
  shape.page_tokens = page_tokens;
  if (config.latent && form == LatentForm::absorbed) {
    shape.h_kv = 1;
    shape.d_head = config.latent->latent();
    shape.d_value = 0;
  } else if (config.latent) {
    shape.h_kv = config.h_q;
    shape.d_value = config.latent->d_v;
  }
  if (config.indexer) shape.d_index = config.indexer->d_head;
  return shape;
}

std::vector<std::int64_t> layer_windows(const ModelConfig& config) {
  std::vector<std::int64_t> windows;
  for (const LayerAttention& layer : config.layers) windows.push_back(layer.window);
  return windows;
}

kv::SequenceCache make_cache(const ModelConfig& config, std::shared_ptr<kv::PagePool> pool,
                             const kv::Policy& policy) {
  return {std::move(pool), policy, layer_windows(config)};
}

}  // namespace basin::models
