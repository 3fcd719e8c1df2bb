// The effective budget: how many keys hold a share of the mass.
#include <algorithm>
#include <bit>

#include "probe/layer.h"

namespace basin::probe {
namespace {

// Buckets by exponent and the first three bits of the fraction; weights are at most 1 but for rounding.
constexpr unsigned kShift = 20;
constexpr std::size_t kBuckets = (std::bit_cast<std::uint32_t>(1.0f) >> kShift) + 2;

std::size_t bucket(float value) {
  return std::min<std::size_t>(std::bit_cast<std::uint32_t>(value) >> kShift, kBuckets - 1);
}

}  // namespace

std::array<std::int64_t, 3> budgets(const float* values, std::int64_t count, double mass) {
  struct Bucket {
    double sum = 0.0;
    std::int64_t count = 0;
  };
  thread_local std::array<Bucket, kBuckets> buckets;
  thread_local std::vector<float> inside;
  std::size_t lowest = kBuckets;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t b = bucket(values[i]);
    lowest = std::min(lowest, b);
    buckets[b].sum += static_cast<double>(values[i]);
    ++buckets[b].count;
  }
  std::array<std::int64_t, 3> result{};
  std::size_t share = 0;
  double above = 0.0;  // mass and number of the values in higher buckets
  std::int64_t taken = 0;
  for (std::size_t b = kBuckets; b-- > lowest && share < kBudgetShares.size();) {
    if (buckets[b].count > 0 && above + buckets[b].sum >= kBudgetShares[share] * mass) {
      inside.clear();
      for (std::int64_t i = 0; i < count; ++i) {
        if (bucket(values[i]) == b) inside.push_back(values[i]);
      }
      std::sort(inside.begin(), inside.end(), std::greater<>());
      double sum = above;
      std::int64_t number = taken;
      for (const float value : inside) {
        sum += static_cast<double>(value);
        ++number;
        while (share < kBudgetShares.size() && sum >= kBudgetShares[share] * mass) result[share++] = number;
      }
    }
    above += buckets[b].sum;
    taken += buckets[b].count;
  }
  for (; share < kBudgetShares.size(); ++share) result[share] = count;  // short by rounding only
  for (std::size_t b = lowest; b < kBuckets; ++b) buckets[b] = {};
  return result;
}

}  // namespace basin::probe
