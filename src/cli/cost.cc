#include "cli/cost.h"

#include <algorithm>

namespace basin::cli {

std::int64_t visible_keys(const models::LayerAttention& layer, const engine::StreamOptions& options,
                          std::int64_t position) {
  const std::int64_t all = position + 1;
  if (layer.window > 0) return std::min(all, layer.window);  // a request's window acts on full layers only
  if (options.window) return std::min(all, options.sink_tokens + *options.window);
  return all;
}

double pass_flops(const models::ModelConfig& config, const engine::StreamOptions& options, std::int64_t first,
                  std::int64_t tokens, std::int64_t logits_rows) {
  const std::int64_t mlps = config.experts > 0 ? config.chosen_experts : 1;
  const std::int64_t layer_weights = config.hidden * config.d_head * (2 * config.h_q + 2 * config.h_kv) +
                                     config.hidden * config.experts +
                                     mlps * 3 * config.hidden * config.intermediate;
  const auto layers = static_cast<std::int64_t>(config.layers.size());
  double flops = 2.0 * static_cast<double>(layer_weights) * static_cast<double>(layers * tokens);
  flops += 2.0 * static_cast<double>(config.hidden * config.vocabulary) * static_cast<double>(logits_rows);
  for (const models::LayerAttention& layer : config.layers) {
    std::int64_t keys = 0;
    for (std::int64_t t = 0; t < tokens; ++t) keys += visible_keys(layer, options, first + t);
    flops += 4.0 * static_cast<double>(config.h_q * config.d_head) * static_cast<double>(keys);
  }
  return flops;
}

double pass_weight_bytes(const models::Model& model) {
  const models::ModelConfig& config = model.config();
  std::int64_t unread = (config.experts - config.chosen_experts) * 3 * config.hidden * config.intermediate *
                        static_cast<std::int64_t>(config.layers.size());
  if (!config.tied_embeddings) unread += config.hidden * config.vocabulary;
  // The dtypes of single tensors are not part of the interface; their share of the parameters is close.
  const double share = static_cast<double>(unread) / static_cast<double>(model.parameters());
  return static_cast<double>(model.weight_bytes()) * (1.0 - share);
}

}  // namespace basin::cli
