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
  visit("map", p.map, ArrayShape{p.bins, p.bins});
  visit("head_map", p.head_map, ArrayShape{p.heads, p.head_bins, p.head_bins});
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

/// The numbers that each_profile_array's shapes come from, and back.
std::vector<std::int64_t> profile_numbers(const LayerProfile& profile);
/// False where their count is another.
bool read_profile_numbers(const std::vector<std::int64_t>& numbers, LayerProfile& profile);

}  // namespace basin::probe
