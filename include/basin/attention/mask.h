// The one visibility rule of the fast paths. (The reference has its own, so that tests compare two.)
#pragma once

#include <algorithm>
#include <cstdint>

#include "basin/attention/spec.h"

namespace basin::attention {

/// Position of query i of a sequence: bottom-right alignment, so it may be negative.
constexpr std::int64_t query_position(const Sequence& sequence, std::int64_t i) {
  return sequence.kv_tokens - sequence.q_tokens + i;
}

/// Whether the query at position p sees the key at position j >= 0.
constexpr bool visible(const Mask& mask, std::int64_t p, std::int64_t j) {
  if (mask.causal && j > p) return false;
  if (j < mask.sink_tokens) return true;
  return (mask.window == 0 || p - j < mask.window) && (mask.window_right < 0 || j - p <= mask.window_right);
}

/// Half-open range of key positions; empty when end <= begin.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  constexpr std::int64_t size() const { return std::max<std::int64_t>(end - begin, 0); }
};

/// The visible keys of a row: two disjoint ranges, ascending. `sinks` is empty when the window reaches key 0.
struct VisibleKeys {
  KeyRange sinks;
  KeyRange recent;
  constexpr std::int64_t size() const { return sinks.size() + recent.size(); }
};

constexpr VisibleKeys visible_keys(const Mask& mask, std::int64_t p, std::int64_t kv_tokens) {
  const std::int64_t limit = std::clamp<std::int64_t>(mask.causal ? p + 1 : kv_tokens, 0, kv_tokens);
  VisibleKeys keys;
  keys.sinks = {0, std::min(mask.sink_tokens, limit)};
  keys.recent.begin = mask.window == 0 || mask.window > p ? 0 : p - mask.window + 1;
  // Compare before adding: p + window_right overflows for huge windows.
  keys.recent.end =
      mask.window_right < 0 || mask.window_right >= limit - p ? limit : p + mask.window_right + 1;
  keys.recent.end = std::max<std::int64_t>(keys.recent.end, 0);
  if (keys.recent.end <= keys.recent.begin) {
    keys.recent = {keys.sinks.end, keys.sinks.end};
  } else if (keys.recent.begin <= keys.sinks.end) {  // touching: one range
    keys.recent = {0, std::max(keys.recent.end, keys.sinks.end)};
    keys.sinks = {0, 0};
  }
  return keys;
}

}  // namespace basin::attention
