#include "probe/layer_arrays.h"

#include <algorithm>

namespace basin::probe {
namespace {

constexpr std::int64_t kDataSide = 128;  // of a head's map in data.npz

}  // namespace

std::vector<float> shares(const float* sums, const LayerProfile& p, std::int64_t heads) {
  std::vector<float> map(static_cast<std::size_t>(p.bins * p.bins), 0.0f);
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < p.bins; ++i) {
      const auto queries = static_cast<float>(std::min(p.bin_tokens, p.tokens - i * p.bin_tokens));
      for (std::int64_t j = 0; j < p.bins; ++j) {
        map[static_cast<std::size_t>(i * p.bins + j)] +=
            sums[(h * p.bins + i) * p.bins + j] / queries / static_cast<float>(heads);
      }
    }
  }
  return map;
}

std::vector<float> shrink_map(const std::vector<float>& map, std::int64_t side, std::int64_t to) {
  if (to >= side) return map;
  std::vector<float> out(static_cast<std::size_t>(to * to), 0.0f);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(to), 0);
  for (std::int64_t i = 0; i < side; ++i) ++rows[static_cast<std::size_t>(i * to / side)];
  for (std::int64_t i = 0; i < side; ++i) {
    const std::int64_t row = i * to / side;
    for (std::int64_t j = 0; j < side; ++j) {
      out[static_cast<std::size_t>(row * to + j * to / side)] +=
          map[static_cast<std::size_t>(i * side + j)] /
          static_cast<float>(rows[static_cast<std::size_t>(row)]);
    }
  }
  return out;
}

std::vector<float> mean_map(const LayerProfile& p) {
  return shares(p.map.data(), p, p.heads);
}

std::vector<float> head_maps(const LayerProfile& p, std::int64_t& side) {
  side = std::min(kDataSide, p.bins);
  std::vector<float> maps;
  for (std::int64_t h = 0; h < p.heads; ++h) {
    const std::vector<float> map = shrink_map(shares(p.map.data() + h * p.bins * p.bins, p, 1), p.bins, side);
    maps.insert(maps.end(), map.begin(), map.end());
  }
  return maps;
}

}  // namespace basin::probe
