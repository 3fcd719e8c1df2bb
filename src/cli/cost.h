// How much arithmetic and memory traffic a pass costs by the model's shape: the yardstick of `basin bench`.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "models/model.h"

namespace basin::cli {

/// Multiplications and additions of reading `tokens` tokens from logical position `first`: all products, and
/// attention over the visible keys. `logits_rows` of them go through the output matrix.
double pass_flops(const models::ModelConfig& config, const engine::StreamOptions& options, std::int64_t first,
                  std::int64_t tokens, std::int64_t logits_rows);

/// Keys visible to the token at `position` in a layer with `window` (0 = all).
std::int64_t visible_keys(const models::LayerAttention& layer, const engine::StreamOptions& options,
                          std::int64_t position);

}  // namespace basin::cli
