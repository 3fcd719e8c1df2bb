// Many rows (prefill) of one head: the time is that of arithmetic, so a tile is packed once for all rows. For the kernel
// source only.
#pragma once

#include "attention/cpu/tile.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

struct ManyRowsScratch {
  alignas(64) float keys[kTileKeys * kMaxHead];
  alignas(64) float values[kTileKeys * kMaxHead];
  std::uint64_t mask[2][kMaxBlockRows];  // of this tile and of the next
};

// One tile of keys, prepared for all rows of the block.
struct Tile {
  std::int64_t begin;
  const float* keys;          // packed
  Values values;              // as floats
  const std::uint64_t* mask;  // [rows] as in Found
  const float* pairs =
      nullptr;  // values as pair_values() left them, for storages with pair dots instead of floats
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

// The set bits of `word` of each lane.
BASIN_INLINE F16 keep_bits(const F16& a, std::uint32_t word) {
  const V kept = hn::BitCast(D(), hn::Set(DU(), word));
  return make([&](auto i) BASIN_LAMBDA { return hn::And(a.part[i], kept); });
}

// Which keys of a tile R rows see.
struct Seen {
  const std::uint64_t* mask;  // [R]
  std::uint64_t any, all;     // bit i = some row, every row sees key i
};

// As accumulate(), with probabilities and values in pairs. values[pair][d_v], acc[R][d_v]: NV vectors of each.
template <int R, int NV>
BASIN_INLINE void accumulate_pairs(const float* values, const Seen& seen, const float (*p)[kTileKeys],
                                   const float* rescale, float* acc, int d_v) {
  const auto at = [&](int row, int i) { return static_cast<std::ptrdiff_t>(row) * d_v + i * kLanes; };
  Matrix<F16, R, NV> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA {
    const F16 factor = set(rescale[r]);
    unroll<NV>([&](auto i) BASIN_LAMBDA { sum[r][i] = mul(load(acc + at(r, i)), factor); });
  });
  constexpr std::uint64_t kFirsts = 0x5555555555555555u;  // of each pair
  const std::uint64_t full = seen.all & shift_right(seen.all, 1) & kFirsts;
  const std::uint64_t gaps = ~(full | shift_left(full, 1));
  std::uint64_t left = (seen.any | shift_right(seen.any, 1)) & kFirsts;
  while (left != 0) {
    int pair = __builtin_ctzll(left) / 2;
    if ((shift_right(full, 2 * pair) & 1) != 0) {
      const std::uint64_t gaps_after = shift_right(gaps, 2 * pair);
      const int end = gaps_after == 0 ? kTileKeys / 2 : pair + __builtin_ctzll(gaps_after) / 2;
      for (; pair < end; ++pair) {
        Array<F16, NV> value;
        unroll<NV>([&](auto i) BASIN_LAMBDA { value[i] = load(values + at(pair, i)); });
        unroll<R>([&](auto r) BASIN_LAMBDA {
          const F16 weight = set(p[r][pair]);
          unroll<NV>([&](auto i) BASIN_LAMBDA { sum[r][i] = dot_step(weight, value[i], sum[r][i]); });
        });
      }
      left = end == kTileKeys / 2 ? 0 : left & shift_left(~std::uint64_t{0}, 2 * end);
      continue;
    }
    // Zero times zero stands for a key that a row does not see: its probability is zero, but its value may be a NaN.
    unroll<R>([&](auto r) BASIN_LAMBDA {
      const std::uint64_t which = shift_right(seen.mask[r], 2 * pair) & 3;
      if (which == 0) return;
      const std::uint32_t seen_halves =
          ((which & 1) != 0 ? 0xffff0000u : 0) | ((which & 2) != 0 ? 0xffffu : 0);
      const F16 weight = set(p[r][pair]);
      unroll<NV>([&](auto i) BASIN_LAMBDA {
        sum[r][i] = dot_step(weight, keep_bits(load(values + at(pair, i)), seen_halves), sum[r][i]);
      });
    });
    left &= left - 1;
  }
  unroll<R>([&](auto r)
                BASIN_LAMBDA { unroll<NV>([&](auto i) BASIN_LAMBDA { store(sum[r][i], acc + at(r, i)); }); });
}

template <int R>
BASIN_INLINE void accumulate_all_pairs(const float* values, const Seen& seen, const float (*p)[kTileKeys],
                                       const float* rescale, float* acc, int d_v) {
  int d = 0;
  for (; d + kMaxGroups * kLanes <= d_v; d += kMaxGroups * kLanes) {
    accumulate_pairs<R, kMaxGroups>(values + d, seen, p, rescale, acc + d, d_v);
  }
  for (; d < d_v; d += kLanes) accumulate_pairs<R, 1>(values + d, seen, p, rescale, acc + d, d_v);
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

  constexpr Probabilities kLayout = pair_dots<kStorage>() ? Probabilities::pairs : Probabilities::floats;
  Array<float, R> rescale;
  softmax_rows<kStorage, kLayout>(block, {mask, R}, R, first, last, x, state.m + row,
                                  state.l + static_cast<std::ptrdiff_t>(row) * kLanes, rescale);
  float* acc = state.acc + static_cast<std::ptrdiff_t>(row) * block.d_v;
  if constexpr (pair_dots<kStorage>()) {
    accumulate_all_pairs<R>(tile.pairs, {mask, any, all}, x, rescale, acc, block.d_v);
  } else {
    accumulate_all<Storage::f32, R>(tile.values, mask, any, all, x, rescale, acc, block.d_v, NothingAhead());
  }
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

// Asks for keys of the next tile, and their values, in the second cache: those whose share of all comes with this row.
template <Storage kStorage>
BASIN_INLINE void fetch_keys(const Block& block, const Found& next, int row) {
  const int end_row = row + kMaxRows < block.rows ? row + kMaxRows : block.rows;
  constexpr int kBytes = stored_bytes<kStorage>();
  const auto fetch = [](const std::byte* p, int bytes) BASIN_LAMBDA {
    for (int at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(p + at, 0, 2);
  };
  for (int key = kTileKeys * row / block.rows; key < kTileKeys * end_row / block.rows; ++key) {
    fetch(next.key[key], block.d_qk * kBytes);
    fetch(next.value[key], block.d_v * kBytes);
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

  Found found[2];
  found[0].mask = scratch.mask[0];
  found[1].mask = scratch.mask[1];
  bool more = find_tile(block, begin, end, found[0]);
  for (int at = 0; more; at = 1 - at) {
    const Found& here = found[at];
    Found& next = found[1 - at];
    more = find_tile(block, here.begin + kTileKeys, end, next);
    pack_tile<kStorage>(here, block.d_qk, scratch.keys);
    touch(here.value, block.d_v * stored_bytes<kStorage>());
    if constexpr (pair_dots<kStorage>()) {
      pair_values(here.value, block.d_v, scratch.values);
    } else if constexpr (kStorage != Storage::f32) {
      widen_values<kStorage>(here.value, 0, block.d_v, scratch.values);
    }
    const Tile tile = {here.begin,
                       scratch.keys,
                       {kStorage == Storage::f32 ? here.value : widened, 0},
                       here.mask,
                       scratch.values};
    for (int row = 0; row < block.rows; row += kMaxRows) {
      const int left = block.rows - row;
      with_rows(left < kMaxRows ? left : kMaxRows,
                [&](auto rows) BASIN_LAMBDA { tile_rows<kStorage, rows>(block, tile, row, state); });
      if (more) fetch_keys<kStorage>(block, next, row);
    }
  }
  fold_lanes(block.rows, state.l);
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET
