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
  // Neighbours are often in one bucket: four tables, so that an addition need not wait for the one before.
  constexpr std::size_t kTables = 4;
  thread_local std::array<std::array<Bucket, kBuckets>, kTables> tables;
  thread_local std::vector<float> inside;
  std::size_t lowest = kBuckets;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t b = bucket(values[i]);
    Bucket& to = tables[static_cast<std::size_t>(i) % kTables][b];
    lowest = std::min(lowest, b);
    to.sum += static_cast<double>(values[i]);
    ++to.count;
  }
  // The buckets in which a share is reached, what is above them, and their values.
  struct Border {
    std::size_t bucket;
    double above;
    std::int64_t taken;
  };
  std::array<Border, kBudgetShares.size()> border;
  std::size_t borders = 0, share = 0;
  double above = 0.0;
  std::int64_t taken = 0;
  for (std::size_t b = kBuckets; b-- > lowest && share < kBudgetShares.size();) {
    Bucket all;
    for (const auto& table : tables) {
      all.sum += table[b].sum;
      all.count += table[b].count;
    }
    if (all.count > 0 && above + all.sum >= kBudgetShares[share] * mass) {
      border[borders++] = {b, above, taken};
      while (share < kBudgetShares.size() && above + all.sum >= kBudgetShares[share] * mass) ++share;
    }
    above += all.sum;
    taken += all.count;
  }
  for (auto& table : tables) {
    std::fill(table.begin() + static_cast<std::ptrdiff_t>(lowest), table.end(), Bucket());
  }

  std::array<std::int64_t, 3> result{};
  share = 0;
  for (std::size_t i = 0; i < borders; ++i) {
    inside.clear();
    for (std::int64_t v = 0; v < count; ++v) {
      if (bucket(values[v]) == border[i].bucket) inside.push_back(values[v]);
    }
    std::sort(inside.begin(), inside.end(), std::greater<>());
    double sum = border[i].above;
    std::int64_t number = border[i].taken;
    for (const float value : inside) {
      sum += static_cast<double>(value);
      ++number;
      while (share < kBudgetShares.size() && sum >= kBudgetShares[share] * mass) result[share++] = number;
    }
  }
  for (; share < kBudgetShares.size(); ++share) result[share] = count;  // short by rounding only
  return result;
}

}  // namespace basin::probe
