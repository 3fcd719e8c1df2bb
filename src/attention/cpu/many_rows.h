// Many rows (prefill) of one head: the time is that of arithmetic, so a tile is packed once for all rows. For the kernel
// source only.
#pragma once

#include "attention/cpu/tile.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

struct ManyRowsScratch {
  alignas(64) float keys[kTileKeys * kMaxHead];
  alignas(64) float values[kTileKeys * kMaxHead];
  std::uint64_t mask[kMaxBlockRows];
};

// One tile of keys, prepared for all rows of the block.
struct Tile {
  std::int64_t begin;
  const float* keys;          // packed
  Values values;              // as floats
  const std::uint64_t* mask;  // [rows] as in Found
};

// Scores of the groups in [first, last), with one of the two queries.
template <Storage kStorage, int R>
BASIN_INLINE void score_groups(const Block& block, int row, const void* queries, const Tile& tile, int first,
                               int last, float (*out)[kTileKeys]) {
  const int n = steps<kStorage>(block.d_qk);
  const float* q = static_cast<const float*>(queries) + static_cast<std::ptrdiff_t>(row) * n;
  score_groups<kStorage, R>(q, n, tile.keys, first, last, out);
}

// Raw scores of R rows, from `row` on, in the groups [first, last) of one tile, by the query that each key is read with.
template <Storage kStorage, int R>
BASIN_INLINE void score_rows(const Block& block, const Tile& tile, int row, int first, int last,
                             Matrix<float, R, kTileKeys>& x) {
  const std::int64_t sinks =
      block.q_sink == nullptr ? 0 : block.sink_tokens - tile.begin;  // sink keys in this tile
  if (sinks <= 0) return score_groups<kStorage, R>(block, row, block.q, tile, first, last, x);
  score_groups<kStorage, R>(block, row, block.q_sink, tile, first, last, x);
  if (sinks >= kTileKeys) return;
  alignas(64) Matrix<float, R, kTileKeys> other;
  score_groups<kStorage, R>(block, row, block.q, tile, first, last, other);
  const std::uint64_t sink_bits = bits(0, sinks);
  for (int r = 0; r < R; ++r) {
    for (int g = first; g < last; ++g) {
      const std::uint32_t lanes = group_bits(sink_bits, g);
      store(choose(lanes, load(x[r] + g * kLanes), load(other[r] + g * kLanes)), x[r] + g * kLanes);
    }
  }
}

// R rows, from `row` on, against one tile.
template <Storage kStorage, int R>
void tile_rows(const Block& block, const Tile& tile, int row, const State& state) {
  const std::uint64_t* mask = tile.mask + row;
  std::uint64_t any = 0;
  std::uint64_t all = ~std::uint64_t{0};
  for (int r = 0; r < R; ++r) {
    any |= mask[r];
    all &= mask[r];
  }
  if (any == 0) return;
  const int first = first_group(any);
  const int last = end_group(any);

  alignas(64) Matrix<float, R, kTileKeys> x;
  score_rows<kStorage, R>(block, tile, row, first, last, x);

  Array<float, R> rescale;
  softmax_rows<kStorage>(block, {mask, R}, R, first, last, x, state.m + row,
                         state.l + static_cast<std::ptrdiff_t>(row) * kLanes, rescale);
  NothingAhead nothing;
  accumulate_all<Storage::f32, R>(tile.values, mask, any, all, x, rescale,
                                  state.acc + static_cast<std::ptrdiff_t>(row) * block.d_v, block.d_v,
                                  nothing);
}

BASIN_INLINE void read_byte(const std::byte* p) {
  static_cast<void>(*static_cast<const volatile std::byte*>(p));
}

// Reads one byte of every cache line of some rows, in the order of memory, so that the hardware's prefetchers see a
// stream.
BASIN_INLINE void touch(const std::byte* const (&row)[kTileKeys], std::int64_t row_bytes) {
  for (const std::byte* p : row) {
    for (std::int64_t at = 0; at < row_bytes; at += kCacheLine) read_byte(p + at);
  }
}

// Transposes the keys of a found tile.
template <Storage kStorage>
BASIN_INLINE void pack_tile(const Found& found, int d_qk, float* keys) {
  const int n = steps<kStorage>(d_qk);
  touch(found.key, d_qk * stored_bytes<kStorage>());
  for (int g = first_group(found.any); g < end_group(found.any); ++g) {
    pack_group<kStorage>(found.key + g * kLanes, 0, d_qk, keys + static_cast<std::ptrdiff_t>(g) * n * kLanes);
  }
}

template <Storage kStorage>
void many_rows(const Block& block, std::int64_t begin, std::int64_t end, const State& state, void* memory) {
  ManyRowsScratch& scratch = *static_cast<ManyRowsScratch*>(memory);
  const std::byte* widened[kTileKeys];
  for (int i = 0; i < kTileKeys; ++i) {
    widened[i] =
        reinterpret_cast<const std::byte*>(scratch.values + static_cast<std::ptrdiff_t>(i) * block.d_v);
  }

  Found found;
  found.mask = scratch.mask;
  while (find_tile(block, begin, end, found)) {
    begin = found.begin + kTileKeys;
    pack_tile<kStorage>(found, block.d_qk, scratch.keys);
    touch(found.value, block.d_v * stored_bytes<kStorage>());
    if (kStorage != Storage::f32) widen_values<kStorage>(found.value, 0, block.d_v, scratch.values);
    const Tile tile = {
        found.begin, scratch.keys, {kStorage == Storage::f32 ? found.value : widened, 0}, found.mask};
    for (int row = 0; row < block.rows; row += kMaxRows) {
      const int left = block.rows - row;
      with_rows(left < kMaxRows ? left : kMaxRows,
                [&](auto rows) BASIN_LAMBDA { tile_rows<kStorage, rows>(block, tile, row, state); });
    }
  }
  fold_lanes(block.rows, state.l);
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET
