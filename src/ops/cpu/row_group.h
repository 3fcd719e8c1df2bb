// Sixteen rows of a panel, whose outputs lie in the lanes of one vector.
#pragma once

#include "ops/cpu/words.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

struct RowGroup {
  const std::byte* rows;  // row_bytes apart
  std::int64_t row_bytes;
  std::int64_t row;       // of the panel
  std::int64_t count;     // that exist; the others are zeros
  const std::byte* next;  // what is read after it
};

/// A group unpacked: for each block of 32 elements, a word for each four of them, its d's and its m.
struct Packed {
  std::byte* q;
  float* d;
  float* m;
};

// The group from `row` on. Nothing may be read behind the last row, so the last ones are copied if they are fewer.
BASIN_INLINE RowGroup group_at(const Panel& panel, std::int64_t row, float* copy) {
  const std::byte* rows = panel.weight + row * panel.row_bytes;
  RowGroup group = {rows, panel.row_bytes, row, panel.rows - row, panel.after};
  if (group.count > kGroupRows) group.next = rows + kGroupRows * panel.row_bytes;
  if (group.next == nullptr) group.next = rows;
  if (group.count >= kGroupRows) {
    group.count = kGroupRows;
  } else {
    auto* bytes = reinterpret_cast<std::byte*>(copy);
    const auto given = static_cast<std::size_t>(group.count * panel.row_bytes);
    __builtin_memcpy(bytes, group.rows, given);
    __builtin_memset(bytes + given, 0, static_cast<std::size_t>(kGroupRows * panel.row_bytes) - given);
    group.rows = bytes;
  }
  return group;
}

// Fetches what is read after a group while that is read, in the order of memory: the hardware sees no stream where
// sixteen rows are read together, a piece of each. A piece is kBytes of each row, and its lines are asked for one by one, in
// kTimes calls, since a core forgets what exceeds the misses that it can follow. Cores that have AMX follow more misses of the second
// cache than of the first, and further ahead.
template <std::int64_t kBytes, int kTimes>
struct Ahead {
#if defined(BASIN_TARGET_amx)
  static constexpr int kLocality = 2;
  static constexpr std::int64_t kFurther = 16384;
#else
  static constexpr int kLocality = 3;
  static constexpr std::int64_t kFurther = 0;
#endif
  const std::byte* from;

  Ahead(const RowGroup& group, std::int64_t offset)  // which is how far into each row the piece begins
      : from(group.next + kGroupRows * offset + kFurther) {}

  template <int kTime>
  BASIN_INLINE void fetch() const {
    constexpr std::int64_t kLines = (kGroupRows * kBytes + kCacheLine - 1) / kCacheLine;
    constexpr std::int64_t kFirst = kTime * kLines / kTimes, kLast = (kTime + 1) * kLines / kTimes;
    unroll<static_cast<int>(kLast - kFirst)>(
        [&](auto i) BASIN_LAMBDA { __builtin_prefetch(from + (kFirst + i) * kCacheLine, 0, kLocality); });
  }
};

// The sums of one token, and the bias, to y.
BASIN_INLINE void finish_group(const Panel& panel, const RowGroup& group, std::int64_t token,
                               const F16& sum) {
  float* y = panel.y + token * panel.y_stride + group.row;
  const float* bias = panel.bias == nullptr ? nullptr : panel.bias + group.row;
  if (group.count == kGroupRows) {
    store(bias == nullptr ? sum : add(sum, load(bias)), y);
  } else {
    store_some(bias == nullptr ? sum : add(sum, load_some(bias, group.count, 0.0f)), y, group.count);
  }
}

// Four bytes of a token's activations.
BASIN_INLINE std::uint32_t word_at(const std::byte* x) {
  std::uint32_t word;
  __builtin_memcpy(&word, x, 4);
  return word;
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
