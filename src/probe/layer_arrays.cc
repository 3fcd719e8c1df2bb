#include "probe/layer_arrays.h"

namespace basin::probe {

std::vector<std::int64_t> profile_numbers(const LayerProfile& p) {
  return {p.tokens,     p.heads,      p.kv_heads, p.window,     p.sink_tokens,
          p.sink_logit, p.bin_tokens, p.bins,     p.topk_width, p.head_bins};
}

bool read_profile_numbers(const std::vector<std::int64_t>& numbers, LayerProfile& p) {
  if (numbers.size() != profile_numbers(p).size()) return false;
  p.tokens = numbers[0];
  p.heads = numbers[1];
  p.kv_heads = numbers[2];
  p.window = numbers[3];
  p.sink_tokens = numbers[4];
  p.sink_logit = numbers[5] != 0;
  p.bin_tokens = numbers[6];
  p.bins = numbers[7];
  p.topk_width = numbers[8];
  p.head_bins = numbers[9];
  return true;
}

}  // namespace basin::probe
