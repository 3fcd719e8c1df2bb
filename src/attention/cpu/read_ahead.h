// Fetching keys and values of a decode step before they are needed. For the kernel source only.
#pragma once

#include "attention/cpu/tile.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

// For whoever works on a line of keys or values: what to fetch meanwhile is the line `bytes` further on. Where nothing is
// worth fetching, that is the line itself.
class Ahead {
 public:
  static constexpr bool kFetches = true;

  explicit BASIN_INLINE Ahead(std::ptrdiff_t bytes) : bytes_(static_cast<std::uintptr_t>(bytes)) {}

  BASIN_INLINE void fetch(const std::byte* line) const { __builtin_prefetch(at(line)); }

  // The same, once `word` is computed. Left alone, the compiler gathers all prefetches in one place.
  template <typename Word>
  BASIN_INLINE void fetch_after(Word& word, const std::byte* line) const {
#if defined(__AVX512F__)
    asm volatile("prefetcht0 %1" : "+v"(word) : "m"(*at(line)));
#else
    static_cast<void>(word);
    fetch(line);
#endif
  }

 private:
  BASIN_INLINE const std::byte* at(const std::byte* line) const {
    return reinterpret_cast<const std::byte*>(reinterpret_cast<std::uintptr_t>(line) + bytes_);
  }

  std::uintptr_t bytes_;
};

// How far from each piece of the computation that piece lies which comes some time later. A piece is kLanes keys (or
// values) of one head, a window is those of all heads. A tile has 2 * kGroups windows: of its keys, then of its values.
// What it rests on (docs/performance.md has the figures): a core drops prefetches beyond the misses that it can have
// outstanding, so they must be spread evenly through the computation, one line for each that is computed, not a burst per
// tile or even per sixteen keys.
class ReadAhead {
 public:
  ReadAhead(const Block& block, int element_bytes)
      : heads_(block.heads), head_bytes_{block.k_head_bytes, block.v_head_bytes} {
    const int piece_lines = kLanes * ((block.d_qk * element_bytes + kCacheLine - 1) / kCacheLine);
    int pieces = kAheadLines / piece_lines;
    if (pieces == 0) pieces = 1;
    windows_ = static_cast<unsigned>(pieces / heads_);
    heads_ahead_ = pieces % heads_;
    if (windows_ >= 2 * kGroups - 1) windows_ = 2 * kGroups - 1;
    const auto evenly = [](const KeyRows& rows) { return rows.page_tokens % kLanes == 0; };
    useful_ = block.k.row_bytes == block.v.row_bytes && evenly(block.k) && evenly(block.v);
  }

  // Appends the windows of a tile. There is room for two: that which is computed and the next.
  BASIN_INLINE void append(const Found& tile) {
    for (int g = 0; g < kGroups; ++g) {
      first_[(end_ + static_cast<unsigned>(g)) % kWindows] = tile.key[g * kLanes];
      first_[(end_ + static_cast<unsigned>(kGroups + g)) % kWindows] = tile.value[g * kLanes];
    }
    end_ += 2 * kGroups;
  }

  // For the piece of a window and head.
  BASIN_INLINE Ahead during(unsigned window, int head) const {
    unsigned later = window + windows_;
    int later_head = head + heads_ahead_;
    if (later_head >= heads_) {
      later_head -= heads_;
      ++later;
    }
    if (later >= end_ || !useful_) return Ahead(0);
    return Ahead(reinterpret_cast<std::intptr_t>(piece(later, later_head)) -
                 reinterpret_cast<std::intptr_t>(piece(window, head)));
  }

 private:
  static constexpr unsigned kWindows = 4 * kGroups;
  static constexpr int kAheadLines = 96;

  BASIN_INLINE const std::byte* piece(unsigned window, int head) const {
    return first_[window % kWindows] + head * head_bytes_[window / kGroups % 2];
  }

  int heads_;
  std::ptrdiff_t head_bytes_[2];
  unsigned windows_;
  int heads_ahead_;
  bool useful_;  // the rows of a window are as far apart as those of every other
  const std::byte* first_[kWindows];
  unsigned end_ = 0;
};

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET
