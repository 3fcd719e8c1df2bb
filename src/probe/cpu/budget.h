// How many of the largest weights hold a share of their sum: a quickselect by mass. For the kernel source only.
#pragma once

#include "base/lanes.h"
#include "probe/cpu/kernel.h"

namespace basin::probe::cpu::BASIN_TARGET {
namespace {

using namespace basin::BASIN_TARGET;

// Weights are not negative, so that their bits are ordered as they are.
BASIN_INLINE std::uint32_t bits_of(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}

// Sums of floats in double: exact, and so the same in any order, as long as the largest sum has not 2^29 times the
// exponent of the smallest weight.
struct DoubleSum {
  using DD = hn::CappedTag<double, kWidth == 1 ? 1 : kWidth / 2>;
  hn::Vec<DD> even = hn::Zero(DD()), odd = hn::Zero(DD());

  BASIN_INLINE void add(V x) {
#if HWY_TARGET == HWY_SCALAR
    even = hn::Add(even, hn::PromoteTo(DD(), x));
#else
    even = hn::Add(even, hn::PromoteTo(DD(), hn::LowerHalf(x)));
    odd = hn::Add(odd, hn::PromoteTo(DD(), hn::UpperHalf(hn::Half<D>(), x)));
#endif
  }
  BASIN_INLINE double total() const {
#if HWY_TARGET == HWY_SCALAR
    return even.raw;
#else
    return hn::GetLane(hn::SumOfLanes(DD(), hn::Add(even, odd)));
#endif
  }
};

struct Part {
  std::int64_t count;
  double sum;
};

// Moves the weights of at least `pivot` behind the others, keeping their order, and returns how many they are and their
// sum. Writes up to kLanes floats beyond the end; `scratch` has room for count + kLanes.
BASIN_INLINE Part split(float* weights, std::int64_t count, float pivot, float* scratch) {
  store(set(0.0f), weights + count);  // lower ones, which fall off the end
  const V least = hn::Set(D(), pivot);
  DoubleSum sum;
  std::size_t upper = 0, lower = 0;
  for (std::int64_t i = 0; i < count; i += kWidth) {
    const V x = hn::LoadU(D(), weights + i);
    const auto above = hn::Ge(x, least);
    sum.add(hn::IfThenElseZero(above, x));
    upper += hn::CompressStore(x, above, D(), scratch + upper);
    lower += hn::CompressStore(x, hn::Not(above), D(), weights + lower);
  }
  const auto found = static_cast<std::int64_t>(upper);
  for (std::int64_t i = 0; i < found; i += kLanes) store(load(scratch + i), weights + (count - found) + i);
  return {found, sum.total()};
}

BASIN_INLINE void sort_descending(float* x, std::int64_t count) {
  for (std::int64_t i = 1; i < count; ++i) {
    const float value = x[i];
    std::int64_t at = i;
    for (; at > 0 && x[at - 1] < value; --at) x[at] = x[at - 1];
    x[at] = value;
  }
}

// What is still looked for: counts of the shares from `next` to the last.
struct Borders {
  const double* mass;  // [shares] ascending, what the largest weights must hold
  int next, shares;
  std::int64_t* counts;
};

// Weights with bits in [low, high), and what lies above all of them.
struct Range {
  float* weights;
  std::int64_t count;
  std::uint32_t low, high;
  Part above;
};

// Finds the borders up to and without `last`, which all lie in the range.
void find_borders(Range r, int last, Borders& b, float* scratch) {
  constexpr std::int64_t kFew = 12;
  while (b.next < last && r.count > kFew && r.high - r.low > 1) {
    const std::uint32_t middle = r.low + (r.high - r.low) / 2;
    Part upper = split(r.weights, r.count, __builtin_bit_cast(float, middle), scratch);
    const Part through = {r.above.count + upper.count, r.above.sum + upper.sum};
    int in_upper = b.next;
    while (in_upper < last && through.sum >= b.mass[in_upper]) ++in_upper;
    const std::int64_t lower = r.count - upper.count;
    if (in_upper > b.next)
      find_borders({r.weights + lower, upper.count, middle, r.high, r.above}, in_upper, b, scratch);
    r = {r.weights, lower, r.low, middle, through};
  }
  if (b.next == last) return;
  if (r.high - r.low > 1) sort_descending(r.weights, r.count);  // else all are equal
  double sum = r.above.sum;
  for (std::int64_t i = 0; i < r.count && b.next < last; ++i) {
    sum += static_cast<double>(r.weights[i]);
    while (b.next < last && sum >= b.mass[b.next]) b.counts[b.next++] = r.above.count + i + 1;
  }
  while (b.next < last) b.counts[b.next++] = r.above.count + r.count;  // short by rounding only
}

// As Kernel::count_budgets says.
void count_budgets(float* weights, std::int64_t count, const double* mass, int shares, std::int64_t* counts,
                   float* scratch) {
  std::uint32_t low = ~std::uint32_t{0}, high = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(weights[i]);
    low = bits < low ? bits : low;
    high = bits > high ? bits : high;
  }
  Borders borders{mass, 0, shares, counts};
  find_borders({weights, count, low, high + 1, {0, 0.0}}, shares, borders, scratch);
}

}  // namespace
}  // namespace basin::probe::cpu::BASIN_TARGET
