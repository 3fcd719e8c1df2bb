// What forward and backward share: which keys a row sees, and where they lie.
#pragma once

#include <cmath>
#include <vector>

#include "attention/reference/element.h"
#include "basin/attention/reference.h"

namespace basin::attention::reference {

/// The definition of visibility, written as the design states it.
inline bool sees(const Mask& mask, std::int64_t p, std::int64_t j) {
  const bool causal_ok = !mask.causal || j <= p;
  const bool left_ok = mask.window == 0 || p - j < mask.window;
  const bool right_ok = mask.window_right == -1 || j - p <= mask.window_right;
  const bool is_sink = j < mask.sink_tokens;
  return causal_ok && (is_sink || (left_ok && right_ok));
}

/// Element offset of key j of head `head` in contiguous [rows, heads, d] or paged [pages, page_tokens, heads, d].
template <typename Pointer>
std::int64_t key_at(const BasicView<Pointer>& view, const Sequence& sequence, std::int64_t j,
                    std::int64_t head) {
  if (view.rank == 3) return at(view, sequence.kv_begin + j, head);
  const std::int64_t page_tokens = view.shape[1];
  const std::int64_t page = sequence.pages[j / page_tokens];
  return page * view.stride[0] + (j % page_tokens) * view.stride[1] + head * view.stride[2];
}

inline std::vector<std::int64_t> keys_of(const Mask& mask, const Sequence& sequence, std::int64_t i) {
  const std::int64_t p = sequence.kv_tokens - sequence.q_tokens + i;
  std::vector<std::int64_t> keys;
  for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
    if (sees(mask, p, j)) keys.push_back(j);
  }
  return keys;
}

/// The sink logit of a head; -inf without one.
inline double sink_of(const float* floats, const Doubles& doubles, std::int64_t head) {
  if (doubles.sink_logit != nullptr) return doubles.sink_logit[head];
  return floats != nullptr ? static_cast<double>(floats[head]) : kNoSink;
}

}  // namespace basin::attention::reference
