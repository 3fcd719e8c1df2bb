// The arrays of a layer's profile by name: one list for files, reports and other languages.
#pragma once

#include <cstdint>
#include <vector>

#include "probe/layer.h"

namespace basin::probe {

using ArrayShape = std::vector<std::int64_t>;

/// visit(name, vector, shape) for every array of floats. `Profile` is LayerProfile or const.
template <typename Profile, typename Visit>
void each_profile_array(Profile& p, const Visit& visit) {
  const auto n = static_cast<std::int64_t>(p.sink_counts.size()),
             w = static_cast<std::int64_t>(p.windows.size());
  const auto shares = static_cast<std::int64_t>(kBudgetShares.size());
  visit("position", p.position, ArrayShape{p.heads, p.tokens});
  visit("distance", p.distance, ArrayShape{p.heads, p.tokens});
  visit("early", p.early, ArrayShape{p.heads, kEarlyTokens});
  visit("map", p.map, ArrayShape{p.heads, p.bins, p.bins});
  visit("entropy", p.entropy, ArrayShape{p.heads, p.bins});
  visit("group_entropy", p.group_entropy, ArrayShape{p.kv_heads, p.bins});
  visit("budget", p.budget, ArrayShape{shares, p.heads, p.bins});
  visit("group_budget", p.group_budget, ArrayShape{shares, p.kv_heads, p.bins});
  visit("learned_sink", p.learned_sink, ArrayShape{p.heads, p.bins});
  visit("sink_mass", p.sink_mass, ArrayShape{n, p.heads});
  visit("sink_by_query", p.sink_by_query, ArrayShape{n, p.heads, p.bins});
  visit("local_mass", p.local_mass, ArrayShape{w, p.heads});
  visit("retained", p.retained, ArrayShape{n + 1, w, p.heads});
}

/// What data.npz holds instead of `map`: shares of a query's mass, the mean over heads [bins, bins], and each head on its own
/// [heads, side, side], side at most 128.
std::vector<float> mean_map(const LayerProfile& profile);
std::vector<float> head_maps(const LayerProfile& profile, std::int64_t& side);

/// Sums of a map into shares: row i of [heads, bins, bins] divided by its queries, and the mean over heads.
std::vector<float> shares(const float* sums, const LayerProfile& p, std::int64_t heads);
/// A square map with fewer bins: shares of keys are added, those of queries averaged.
std::vector<float> shrink_map(const std::vector<float>& map, std::int64_t side, std::int64_t to);

}  // namespace basin::probe
