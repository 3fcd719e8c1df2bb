// The caches that a model's passes want.
#pragma once

#include <memory>
#include <vector>

#include "kv/sequence_cache.h"
#include "models/model.h"

namespace basin::models {

/// What latent attention keeps of a token (models/model.h). Other models have one form only.
enum class LatentForm { absorbed, expanded };

/// Of the pages for the layers with full attention.
kv::Shape cache_shape(const ModelConfig& config, ops::Compute compute, std::int64_t page_tokens,
                      LatentForm form = LatentForm::absorbed);

/// Each layer's own window, 0 for full attention.
std::vector<std::int64_t> layer_windows(const ModelConfig& config);

/// An empty cache for one sequence: layers with full attention under `policy` on pages of `pool`, which has cache_shape();
/// those with a window of their own on a ring.
kv::SequenceCache make_cache(const ModelConfig& config, std::shared_ptr<kv::PagePool> pool,
                             const kv::Policy& policy);

}  // namespace basin::models
