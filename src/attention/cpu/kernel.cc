// The micro-kernel of attention: R rows against one tile of keys. One source for prefill and decode and for every
// target; the order of operations is that of constants.h and depends on the storage type alone.
#include "attention/cpu/kernel.h"

#include "attention/cpu/pack.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

// Rows and groups of keys (or vectors of d_v) of the register tile: kMaxRows * kMaxGroups accumulators of kParts
// registers, kMaxGroups vectors of keys and one broadcast fit into 32, 16 and 16 registers.
constexpr int kMaxRows = kParts == 1 ? 6 : kParts == 2 ? 3 : 2;
constexpr int kMaxGroups = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
constexpr int kWidenRows = 8;  // with fewer rows, 16-bit values are widened in registers, not once per tile
constexpr int kCacheLine = 64;

struct Scratch {
  alignas(64) float keys[kTileKeys * kMaxHead];
  alignas(64) float values[kTileKeys * kMaxHead];
  std::uint64_t mask[2][kMaxBlockRows];  // of this tile and of the next
};

// A tile that some row of the block sees: which keys, and where they lie.
struct Found {
  std::int64_t begin;
  std::uint64_t any;                  // bit i = some row sees key begin + i
  std::uint64_t* mask;                // [rows] bit i = the row sees key begin + i
  const std::byte* key[kTileKeys];    // null where no row sees the key
  const std::byte* value[kTileKeys];  // null where no row sees the key
};

// One tile of keys, prepared for all rows of the block.
struct Tile {
  std::int64_t begin;
  const float* keys;              // packed
  const std::byte* const* value;  // [kTileKeys] rows, of floats when `values_widened`, else as stored
  std::ptrdiff_t value_offset;    // bytes to add to each
  bool values_widened;
  const std::uint64_t* mask;  // [rows] as in Found
  int first_row;              // of this head, in q and the state
};

// Shifts by a signed count in [0, 64).
BASIN_INLINE std::uint64_t shift_left(std::uint64_t word, int count) {
  return word << static_cast<unsigned>(count);
}
BASIN_INLINE std::uint64_t shift_right(std::uint64_t word, int count) {
  return word >> static_cast<unsigned>(count);
}

// Bits of the tile keys in [from, to), both relative to the tile's begin.
BASIN_INLINE std::uint64_t bits(std::int64_t from, std::int64_t to) {
  if (from < 0) from = 0;
  if (to > kTileKeys) to = kTileKeys;
  if (from >= to) return 0;
  return shift_left(~std::uint64_t{0}, static_cast<int>(from)) &
         shift_right(~std::uint64_t{0}, kTileKeys - static_cast<int>(to));
}

// The sixteen bits of group g.
BASIN_INLINE std::uint32_t group_bits(std::uint64_t word, int g) {
  return static_cast<std::uint32_t>(shift_right(word, g * kLanes)) & 0xffffu;
}

// scores[r][16 g + lane] for G groups from `keys`; q is [R, n] steps apart by `n`.
template <Storage kStorage, int R, int G>
BASIN_INLINE void scores(const float* q, int n, const float* keys, float (*out)[kTileKeys]) {
  Matrix<F16, R, G> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA { unroll<G>([&](auto g) BASIN_LAMBDA { sum[r][g] = set(0.0f); }); });
  for (int s = 0; s < n; ++s) {
    Array<F16, G> key;
    unroll<G>([&](auto g) BASIN_LAMBDA { key[g] = load(keys + (g * n + s) * kLanes); });
    unroll<R>([&](auto r) BASIN_LAMBDA {
      const F16 query = set(q[r * n + s]);
      unroll<G>([&](auto g) BASIN_LAMBDA {
#if defined(__AVX512BF16__)
        if constexpr (pair_dots<kStorage>()) {
          sum[r][g].part[0].raw =
              _mm512_dpbf16_ps(sum[r][g].part[0].raw, reinterpret_cast<__m512bh>(query.part[0].raw),
                               reinterpret_cast<__m512bh>(key[g].part[0].raw));
          return;
        }
#endif
        sum[r][g] = fma(query, key[g], sum[r][g]);
      });
    });
  }
  unroll<R>([&](auto r) BASIN_LAMBDA {
    unroll<G>([&](auto g) BASIN_LAMBDA { store(sum[r][g], out[r] + g * kLanes); });
  });
}

// Scores of the groups in [first, last), with one of the two queries.
template <Storage kStorage, int R>
BASIN_INLINE void score_groups(const Block& block, int row, const void* queries, const Tile& tile, int first,
                               int last, float (*out)[kTileKeys]) {
  const int n = steps<kStorage>(block.d_qk);
  const float* q = static_cast<const float*>(queries) + static_cast<std::ptrdiff_t>(row) * n;
  const auto keys = [&](int g) { return tile.keys + static_cast<std::ptrdiff_t>(g) * n * kLanes; };
  const auto to = [&](int g) { return reinterpret_cast<float(*)[kTileKeys]>(out[0] + g * kLanes); };
  int g = first;
  for (; g + kMaxGroups <= last; g += kMaxGroups) scores<kStorage, R, kMaxGroups>(q, n, keys(g), to(g));
  if constexpr (kMaxGroups > 1) {
    for (; g < last; ++g) scores<kStorage, R, 1>(q, n, keys(g), to(g));
  }
}

// Turns the scores of one row into probabilities rounded to V's type, updates m and l, and returns exp2(m_old - m).
template <Storage kStorage>
BASIN_INLINE float softmax_row(const Block& block, std::uint64_t mask, int first, int last, float* x,
                               float* m, float* l) {
  F16 largest = set(-__builtin_inff());
  const F16 scale = set(block.score_scale);
  const F16 cap = set(block.softcap);
  for (int g = first; g < last; ++g) {
    F16 s = mul(load(x + g * kLanes), scale);
    if (block.softcap != 0.0f) s = mul(tanh(s), cap);
    const std::uint32_t visible = group_bits(mask, g);
    if (visible != 0xffffu) s = keep(s, visible);
    store(s, x + g * kLanes);
    largest = max(largest, s);
  }
  const float old = *m;
  const float tile_max = max_of_lanes(largest);
  const float now = tile_max > old ? tile_max : old;
  *m = now;
  const float reference = now == -__builtin_inff() ? 0.0f : now;  // no key yet: every difference stays -inf
  const F16 base = set(reference);
  const F16 rescale = exp2(sub(set(old), base));
  F16 sum = mul(load(l), rescale);
  for (int g = first; g < last; ++g) {
    const F16 p = exp2(sub(load(x + g * kLanes), base));
    sum = add(sum, p);
    store(round_probability<kStorage>(p), x + g * kLanes);
  }
  store(sum, l);
  return hn::GetLane(rescale.part[0]);
}

// acc[r][d .. d + 16 NV) = rescale[r] acc + P V over the keys each row sees, ascending.
template <Storage kValues, int R, int NV>
BASIN_INLINE void accumulate(const Tile& tile, const std::uint64_t* mask, std::uint64_t any,
                             std::uint64_t all, const float (*p)[kTileKeys], const float* rescale, float* acc,
                             int d_v, int d) {
  Matrix<F16, R, NV> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA {
    const F16 factor = set(rescale[r]);
    unroll<NV>([&](auto i) BASIN_LAMBDA {
      sum[r][i] = mul(load(acc + static_cast<std::ptrdiff_t>(r) * d_v + d + i * kLanes), factor);
    });
  });
  const std::ptrdiff_t offset = tile.value_offset + static_cast<std::ptrdiff_t>(d) * stored_bytes<kValues>();
  std::uint64_t left = any;
  while (left != 0) {
    int key = __builtin_ctzll(left);
    const std::uint64_t from_key = shift_right(all, key);
    if ((from_key & 1) != 0) {
      const int end = ~from_key == 0 ? kTileKeys : key + __builtin_ctzll(~from_key);
      for (; key < end; ++key) {
        const std::byte* v = tile.value[key] + offset;
        Array<F16, NV> value;
        unroll<NV>([&](auto i) BASIN_LAMBDA {
          value[i] = load_stored<kValues>(v + i * kLanes * stored_bytes<kValues>());
        });
        unroll<R>([&](auto r) BASIN_LAMBDA {
          const F16 weight = set(p[r][key]);
          unroll<NV>([&](auto i) BASIN_LAMBDA { sum[r][i] = fma(weight, value[i], sum[r][i]); });
        });
      }
      left = end == kTileKeys ? 0 : left & shift_left(~std::uint64_t{0}, end);
      continue;
    }
    // Some rows see this key and others do not; a row that does not must not even multiply it by zero (NaN, infinity).
    const std::byte* v = tile.value[key] + offset;
    unroll<R>([&](auto r) BASIN_LAMBDA {
      if ((shift_right(mask[r], key) & 1) == 0) return;
      const F16 weight = set(p[r][key]);
      unroll<NV>([&](auto i) BASIN_LAMBDA {
        sum[r][i] = fma(weight, load_stored<kValues>(v + i * kLanes * stored_bytes<kValues>()), sum[r][i]);
      });
    });
    left &= left - 1;
  }
  unroll<R>([&](auto r) BASIN_LAMBDA {
    unroll<NV>([&](auto i) BASIN_LAMBDA {
      store(sum[r][i], acc + static_cast<std::ptrdiff_t>(r) * d_v + d + i * kLanes);
    });
  });
}

template <Storage kValues, int R>
void accumulate_all(const Tile& tile, const std::uint64_t* mask, std::uint64_t any, std::uint64_t all,
                    const float (*p)[kTileKeys], const float* rescale, float* acc, int d_v) {
  int d = 0;
  for (; d + kMaxGroups * kLanes <= d_v; d += kMaxGroups * kLanes) {
    accumulate<kValues, R, kMaxGroups>(tile, mask, any, all, p, rescale, acc, d_v, d);
  }
  if constexpr (kMaxGroups > 1) {
    for (; d < d_v; d += kLanes) accumulate<kValues, R, 1>(tile, mask, any, all, p, rescale, acc, d_v, d);
  }
}

template <Storage kStorage, int R>
void tile_rows(const Block& block, const Tile& tile, int row_of_head, const State& state) {
  const std::uint64_t* mask = tile.mask + row_of_head;
  const int row = tile.first_row + row_of_head;
  std::uint64_t any = 0;
  std::uint64_t all = ~std::uint64_t{0};
  for (int r = 0; r < R; ++r) {
    any |= mask[r];
    all &= mask[r];
  }
  if (any == 0) return;
  const int first = __builtin_ctzll(any) / kLanes;
  const int last = (63 - __builtin_clzll(any)) / kLanes + 1;

  alignas(64) Matrix<float, R, kTileKeys> x;
  const std::int64_t sinks =
      block.q_sink == nullptr ? 0 : block.sink_tokens - tile.begin;  // sink keys in this tile
  if (sinks <= 0) {
    score_groups<kStorage, R>(block, row, block.q, tile, first, last, x);
  } else {
    score_groups<kStorage, R>(block, row, block.q_sink, tile, first, last, x);
    if (sinks < kTileKeys) {
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
  }

  Array<float, R> rescale;
  for (int r = 0; r < R; ++r) {
    rescale[r] = softmax_row<kStorage>(block, mask[r], first, last, x[r], state.m + row + r,
                                       state.l + static_cast<std::ptrdiff_t>(row + r) * kLanes);
  }
  float* acc = state.acc + static_cast<std::ptrdiff_t>(row) * block.d_v;
  if (tile.values_widened) {
    accumulate_all<Storage::f32, R>(tile, mask, any, all, x, rescale, acc, block.d_v);
  } else {
    accumulate_all<kStorage, R>(tile, mask, any, all, x, rescale, acc, block.d_v);
  }
}

template <Storage kStorage, int R = kMaxRows>
BASIN_INLINE void tile_rows_tail(const Block& block, const Tile& tile, int row, const State& state) {
  if constexpr (R > 0) {
    if (block.rows - row == R) {
      tile_rows<kStorage, R>(block, tile, row, state);
    } else {
      tile_rows_tail<kStorage, R - 1>(block, tile, row, state);
    }
  }
}

// Finds the first tile in [begin, end) that some row sees.
BASIN_INLINE bool find_tile(const Block& block, std::int64_t begin, std::int64_t end, Found& found) {
  for (; begin < end; begin += kTileKeys) {
    std::uint64_t any = 0;
    for (int r = 0; r < block.rows; ++r) {
      const Visible& v = block.visible[r];
      found.mask[r] = bits(0, v.a_end - begin) | bits(v.b_begin - begin, v.b_end - begin);
      any |= found.mask[r];
    }
    if (any == 0) continue;
    found.begin = begin;
    found.any = any;
    find_rows(block.k, begin, any, found.key);
    find_rows(block.v, begin, any, found.value);
    return true;
  }
  return false;
}

BASIN_INLINE void read_byte(const std::byte* p) {
  static_cast<void>(*static_cast<const volatile std::byte*>(p));
}

// Reads one byte of every cache line of the keys [first, last) of a tile, all heads of a key before the next key: in
// the order of memory, so that the hardware's prefetchers see a stream. Each head then finds its rows, which lie far
// apart, in the cache. Without this, decode waits for memory most of the time; prefetch instructions help less.
BASIN_INLINE void touch(const std::byte* const* row, int first, int last, std::int64_t head_bytes, int heads,
                        std::int64_t row_bytes) {
  if (head_bytes == row_bytes) {  // heads side by side: one run of bytes per key
    row_bytes *= heads;
    heads = 1;
  }
  for (int i = first; i < last; ++i) {
    const std::byte* p = row[i];
    if (p == nullptr) continue;
    for (int head = 0; head < heads; ++head, p += head_bytes) {
      std::int64_t at = 0;
      for (; at + 4 * kCacheLine <= row_bytes; at += 4 * kCacheLine) {
        unroll<4>([&](auto line) BASIN_LAMBDA { read_byte(p + at + line * kCacheLine); });
      }
      for (; at < row_bytes; at += kCacheLine) read_byte(p + at);
    }
  }
}

template <Storage kStorage>
BASIN_INLINE void touch(const Block& block, const Found& found, int first, int last) {
  constexpr int kSize = stored_bytes<kStorage>();
  touch(found.key, first, last, block.k_head_bytes, block.heads, block.d_qk * kSize);
  touch(found.value, first, last, block.v_head_bytes, block.heads, block.d_v * kSize);
}

template <Storage kStorage>
void segment(const Block& block, std::int64_t begin, std::int64_t end, const State& state, void* memory) {
  Scratch& scratch = *static_cast<Scratch*>(memory);
  const int n = steps<kStorage>(block.d_qk);
  const bool widen = kStorage != Storage::f32 && block.rows >= kWidenRows;
  const std::byte* widened[kTileKeys];
  for (int i = 0; i < kTileKeys; ++i) {
    widened[i] =
        reinterpret_cast<const std::byte*>(scratch.values + static_cast<std::ptrdiff_t>(i) * block.d_v);
  }

  Found found[2];
  found[0].mask = scratch.mask[0];
  found[1].mask = scratch.mask[1];
  int now = 0;
  bool more = find_tile(block, begin, end, found[0]);
  if (more) touch<kStorage>(block, found[0], 0, kTileKeys);
  while (more) {
    const Found& here = found[now];
    Found& next = found[1 - now];
    more = find_tile(block, here.begin + kTileKeys, end, next);
    const int first = __builtin_ctzll(here.any) / kLanes;
    const int last = (63 - __builtin_clzll(here.any)) / kLanes + 1;
    for (int head = 0; head < block.heads; ++head) {
      // The next tile comes in while this one is computed.
      if (more)
        touch<kStorage>(block, next, kTileKeys * head / block.heads, kTileKeys * (head + 1) / block.heads);

      const std::ptrdiff_t key_offset = head * block.k_head_bytes;
      const std::ptrdiff_t value_offset = head * block.v_head_bytes;
      for (int g = first; g < last; ++g) {
        pack_group<kStorage>(here.key + g * kLanes, key_offset, block.d_qk,
                             scratch.keys + static_cast<std::ptrdiff_t>(g) * n * kLanes);
      }
      if (widen) widen_values<kStorage>(here.value, value_offset, block.d_v, scratch.values);
      const Tile tile = {here.begin,
                         scratch.keys,
                         widen ? widened : here.value,
                         widen ? 0 : value_offset,
                         widen || kStorage == Storage::f32,
                         here.mask,
                         head * block.rows};
      int row = 0;
      for (; row + kMaxRows <= block.rows; row += kMaxRows) {
        tile_rows<kStorage, kMaxRows>(block, tile, row, state);
      }
      tile_rows_tail<kStorage, kMaxRows - 1>(block, tile, row, state);
    }
    now = 1 - now;
  }

  for (int r = 0; r < block.heads * block.rows; ++r) {
    float* l = state.l + static_cast<std::ptrdiff_t>(r) * kLanes;
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) l[i] += l[i + half];
    }
  }
}

void run_segment(const Block& block, std::int64_t begin, std::int64_t end, const State& state,
                 void* scratch) {
  switch (block.storage) {
    case Storage::f32:
      return segment<Storage::f32>(block, begin, end, state, scratch);
    case Storage::f16:
      return segment<Storage::f16>(block, begin, end, state, scratch);
    case Storage::bf16:
      return segment<Storage::bf16>(block, begin, end, state, scratch);
  }
}

void run_pack_queries(Storage storage, int d, int rows, const std::byte* const* row, void* out) {
  float* to = static_cast<float*>(out);
  switch (storage) {
    case Storage::f32:
      return pack_queries<Storage::f32>(d, rows, row, to);
    case Storage::f16:
      return pack_queries<Storage::f16>(d, rows, row, to);
    case Storage::bf16:
      return pack_queries<Storage::bf16>(d, rows, row, to);
  }
}

void clear(int rows, int d_v, const State& state) {
  for (int r = 0; r < rows; ++r) state.m[r] = -__builtin_inff();
  __builtin_memset(state.l, 0, sizeof(float) * static_cast<std::size_t>(rows) * kLanes);
  __builtin_memset(state.acc, 0,
                   sizeof(float) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(d_v));
}

void fold(int rows, int d_v, const State& segment, const State& total) {
  for (int r = 0; r < rows; ++r) {
    const float m_s = segment.m[r];
    const float l_s = segment.l[static_cast<std::ptrdiff_t>(r) * kLanes];
    if (m_s == -__builtin_inff() && l_s == 0.0f) continue;  // no key: exactly nothing (a NaN goes on)
    const float m = total.m[r];
    const float now = m_s > m ? m_s : m;
    const F16 a = exp2(sub(set(m), set(now)));
    const F16 b = exp2(sub(set(m_s), set(now)));
    float* l = total.l + static_cast<std::ptrdiff_t>(r) * kLanes;
    const F16 sum = fma(set(l[0]), a, mul(set(l_s), b));
    l[0] = hn::GetLane(sum.part[0]);
    total.m[r] = now;
    const float* from = segment.acc + static_cast<std::ptrdiff_t>(r) * d_v;
    float* to = total.acc + static_cast<std::ptrdiff_t>(r) * d_v;
    for (int d = 0; d < d_v; d += kLanes) store(fma(load(to + d), a, mul(load(from + d), b)), to + d);
  }
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET

namespace basin::attention::cpu {

Kernel kernel(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
  return {sizeof(Scratch), run_pack_queries, clear, run_segment, fold};
}

}  // namespace basin::attention::cpu
