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

namespace {

// Multiply-adds of one token in the products of a layer's attention, and for each key that it sees.
struct AttentionCost {
  std::int64_t products, per_key;
};

AttentionCost attention_cost(const models::ModelConfig& c) {
  if (!c.latent) return {c.hidden * c.d_head * (2 * c.h_q + 2 * c.h_kv), 2 * c.h_q * c.d_head};
  const models::LatentAttention& latent = *c.latent;
  const std::int64_t queries = latent.q_rank > 0 ? (c.hidden + c.h_q * latent.d_qk()) * latent.q_rank
                                                 : c.hidden * c.h_q * latent.d_qk();
  const std::int64_t heads = c.h_q * (latent.kv_rank * (latent.d_nope + latent.d_v) + latent.d_v * c.hidden);
  return {queries + c.hidden * latent.latent() + heads, c.h_q * (latent.latent() + latent.kv_rank)};
}

// Of all layers.
std::int64_t feed_forward_cost(const models::ModelConfig& c) {
  const auto layers = static_cast<std::int64_t>(c.layers.size());
  const std::int64_t part = 3 * c.hidden;
  if (!c.grouped) {
    return layers * (c.hidden * c.experts + (c.experts > 0 ? c.chosen_experts : 1) * part * c.intermediate);
  }
  const std::int64_t dense = std::ranges::count(c.grouped->dense, true);
  return dense * part * c.intermediate +
         (layers - dense) *
             (c.hidden * c.experts + (c.chosen_experts + c.grouped->shared) * part * c.grouped->intermediate);
}

// What an indexer adds: its products, and scores of every key there is.
double indexer_flops(const models::ModelConfig& c, std::int64_t first, std::int64_t tokens) {
  if (!c.indexer) return 0.0;
  const models::IndexerConfig& indexer = *c.indexer;
  const std::int64_t products =
      indexer.heads * indexer.d_head * c.latent->q_rank + c.hidden * (indexer.d_head + indexer.heads);
  const double keys =
      static_cast<double>(tokens) * (static_cast<double>(first) + 0.5 * static_cast<double>(tokens + 1));
  const double layer =
      static_cast<double>(products * tokens) + static_cast<double>(indexer.heads * indexer.d_head) * keys;
  return 2.0 * layer * static_cast<double>(std::ranges::count(indexer.shared, false));
}

}  // namespace

double pass_flops(const models::ModelConfig& config, const engine::StreamOptions& options, std::int64_t first,
                  std::int64_t tokens, std::int64_t logits_rows) {
  const AttentionCost attention = attention_cost(config);
  const auto layers = static_cast<std::int64_t>(config.layers.size());
  const std::int64_t weights = layers * attention.products + feed_forward_cost(config);
  double flops = 2.0 * static_cast<double>(weights) * static_cast<double>(tokens);
  flops += 2.0 * static_cast<double>(config.hidden * config.vocabulary) * static_cast<double>(logits_rows);
  for (const models::LayerAttention& layer : config.layers) {
    std::int64_t keys = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t visible = visible_keys(layer, options, first + t);
      keys += config.indexer ? std::min(visible, config.indexer->topk) : visible;
    }
    flops += 2.0 * static_cast<double>(attention.per_key) * static_cast<double>(keys);
  }
  return flops + indexer_flops(config, first, tokens);
}

}  // namespace basin::cli
