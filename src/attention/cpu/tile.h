// What happens to one tile of keys, for few rows (few_rows.h) and for many (many_rows.h) alike. The order of operations
// is that of constants.h and depends on the storage type alone. For the kernel source only.
#pragma once

#include "attention/cpu/pack.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

// Rows and groups of keys (or vectors of d_v) of the register tile: kMaxRows * kMaxGroups accumulators of kParts
// registers, kMaxGroups vectors of keys and one broadcast fit into 32, 16 and 16 registers.
constexpr int kMaxRows = kParts == 1 ? 6 : kParts == 2 ? 3 : 2;
constexpr int kMaxGroups = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
constexpr int kGroups = kTileKeys / kLanes;
constexpr int kCacheLine = 64;

// A tile that some row of the block sees: which keys, and where they lie. A key that no row sees has the row of another.
struct Found {
  std::int64_t begin;
  std::uint64_t any;    // bit i = some row sees key begin + i
  std::uint64_t* mask;  // [rows] bit i = the row sees key begin + i
  const std::byte* key[kTileKeys];
  const std::byte* value[kTileKeys];
};

// Values of one tile: each lies `offset` bytes after its row pointer.
struct Values {
  const std::byte* const* row;  // [kTileKeys]
  std::ptrdiff_t offset;
};

// For accumulate() where nothing is to be fetched meanwhile, unlike in read_ahead.h.
struct NothingAhead {
  static constexpr bool kFetches = false;
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

// The groups of sixteen keys from the first to the last of the keys in `any`, which is not empty.
BASIN_INLINE int first_group(std::uint64_t any) {
  return __builtin_ctzll(any) / kLanes;
}
BASIN_INLINE int end_group(std::uint64_t any) {
  return (63 - __builtin_clzll(any)) / kLanes + 1;
}

// Calls body(Index<R>()) with R = rows, 1 <= rows <= kMaxRows.
template <int R = kMaxRows, typename Body>
BASIN_INLINE void with_rows(int rows, const Body& body) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, body);
  }
  body(Index<R>());
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

// sum + a b in each lane, of two bf16 in a word of each: VDPBF16PS, for storages with pair dots.
BASIN_INLINE F16 dot_step(const F16& a, const F16& b, const F16& sum) {
#if defined(__AVX512BF16__)
  F16 result;
  result.part[0].raw = _mm512_dpbf16_ps(sum.part[0].raw, reinterpret_cast<__m512bh>(a.part[0].raw),
                                        reinterpret_cast<__m512bh>(b.part[0].raw));
  return result;
#else
  static_cast<void>(a);
  static_cast<void>(b);
  return sum;
#endif
}

// One step of sixteen score chains: the query's step in every lane, that of each key in its lane.
template <Storage kStorage>
BASIN_INLINE F16 score_step(const F16& query, const F16& key, const F16& sum) {
  if constexpr (pair_dots<kStorage>()) {
    return dot_step(query, key, sum);
  } else {
    return fma(query, key, sum);
  }
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
      unroll<G>([&](auto g) BASIN_LAMBDA { sum[r][g] = score_step<kStorage>(query, key[g], sum[r][g]); });
    });
  }
  unroll<R>([&](auto r) BASIN_LAMBDA {
    unroll<G>([&](auto g) BASIN_LAMBDA { store(sum[r][g], out[r] + g * kLanes); });
  });
}

// The same for the groups in [first, last), as many at once as fit; `keys` and `out` begin with group 0.
template <Storage kStorage, int R>
BASIN_INLINE void score_groups(const float* q, int n, const float* keys, int first, int last,
                               float (*out)[kTileKeys]) {
  const auto packed = [&](int g) { return keys + static_cast<std::ptrdiff_t>(g) * n * kLanes; };
  const auto to = [&](int g) { return reinterpret_cast<float(*)[kTileKeys]>(out[0] + g * kLanes); };
  int g = first;
  for (; g + kMaxGroups <= last; g += kMaxGroups) scores<kStorage, R, kMaxGroups>(q, n, packed(g), to(g));
  if constexpr (kMaxGroups > 1) {
    for (; g < last; ++g) scores<kStorage, R, 1>(q, n, packed(g), to(g));
  }
}

// Scales, caps and masks the scores of one row, and returns the largest.
BASIN_INLINE float finish_scores(const Block& block, std::uint64_t mask, int first, int last, float* x) {
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
  return max_of_lanes(largest);
}

// How the probabilities of a row lie in its tile for the product with the values.
enum class Probabilities {
  floats,
  pairs  // two bf16 in a word, as pair_values() has their values
};

template <Storage kStorage, Probabilities kLayout>
BASIN_INLINE void store_probabilities(const F16& p, int g, float* x) {
#if defined(__AVX512BF16__)
  if constexpr (kLayout == Probabilities::pairs) {
    const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p.part[0].raw));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + g * (kLanes / 2)), _mm256_rol_epi32(rounded, 16));
    return;
  }
#endif
  store(round_probability<kStorage>(p), x + g * kLanes);
}

// Turns scores into probabilities rounded to V's type, and adds the unrounded ones to l.
template <Storage kStorage, Probabilities kLayout>
BASIN_INLINE void finish_probabilities(float reference, float rescale, int first, int last, float* x,
                                       float* l) {
  const F16 base = set(reference);
  F16 sum = mul(load(l), set(rescale));
  for (int g = first; g < last; ++g) {
    const F16 p = exp2(sub(load(x + g * kLanes), base));
    sum = add(sum, p);
    store_probabilities<kStorage, kLayout>(p, g, x);
  }
  store(sum, l);
}

// Which keys of a tile the rows see: those of row r are mask[r mod count].
struct Masks {
  const std::uint64_t* mask;
  int count;
};

// Turns the scores of some rows into probabilities rounded to V's type, updates m and l, and sets rescale to
// exp2(m_old - m). In steps over many rows, since each of them is a long chain of dependent operations.
template <Storage kStorage, Probabilities kLayout = Probabilities::floats>
BASIN_INLINE void softmax_rows(const Block& block, const Masks& masks, int rows, int first, int last,
                               float (*x)[kTileKeys], float* m, float* l, float* rescale) {
  int which = 0;
  for (int begin = 0; begin < rows; begin += kLanes) {
    const int end = begin + kLanes < rows ? begin + kLanes : rows;
    alignas(64) float old[kLanes] = {}, reference[kLanes] = {}, factor[kLanes];
    for (int r = begin; r < end; ++r) {
      const float tile_max = finish_scores(block, masks.mask[which], first, last, x[r]);
      if (++which == masks.count) which = 0;
      old[r - begin] = m[r];
      m[r] = tile_max > m[r] ? tile_max : m[r];
      reference[r - begin] =
          m[r] == -__builtin_inff() ? 0.0f : m[r];  // no key yet: all differences stay -inf
    }
    store(exp2(sub(load(old), load(reference))), factor);
    for (int r = begin; r < end; ++r) {
      rescale[r] = factor[r - begin];
      finish_probabilities<kStorage, kLayout>(reference[r - begin], rescale[r], first, last, x[r],
                                              l + static_cast<std::ptrdiff_t>(r) * kLanes);
    }
  }
}

// acc[r][d .. d + 16 NV) = rescale[r] acc + P V over the keys each row sees, ascending.
template <Storage kValues, int R, int NV, typename Ahead>
BASIN_INLINE void accumulate(const Values& values, const std::uint64_t* mask, std::uint64_t any,
                             std::uint64_t all, const float (*p)[kTileKeys], const float* rescale, float* acc,
                             int d_v, int d, const Ahead& ahead) {
  Matrix<F16, R, NV> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA {
    const F16 factor = set(rescale[r]);
    unroll<NV>([&](auto i) BASIN_LAMBDA {
      sum[r][i] = mul(load(acc + static_cast<std::ptrdiff_t>(r) * d_v + d + i * kLanes), factor);
    });
  });
  const std::ptrdiff_t offset = values.offset + static_cast<std::ptrdiff_t>(d) * stored_bytes<kValues>();
  constexpr int kKeyBytes = NV * kLanes * stored_bytes<kValues>();
  constexpr int kLines = kKeyBytes < kCacheLine ? 1 : kKeyBytes / kCacheLine;
  std::uint64_t left = any;
  while (left != 0) {
    int key = __builtin_ctzll(left);
    const std::uint64_t from_key = shift_right(all, key);
    if ((from_key & 1) != 0) {
      const int end = ~from_key == 0 ? kTileKeys : key + __builtin_ctzll(~from_key);
      for (; key < end; ++key) {
        if constexpr (Ahead::kFetches) {
          unroll<kLines>([&](auto line)
                             BASIN_LAMBDA { ahead.fetch(values.row[key] + offset + line * kCacheLine); });
        }
        const std::byte* v = values.row[key] + offset;
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
    const std::byte* v = values.row[key] + offset;
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

template <Storage kValues, int R, typename Ahead>
void accumulate_all(const Values& values, const std::uint64_t* mask, std::uint64_t any, std::uint64_t all,
                    const float (*p)[kTileKeys], const float* rescale, float* acc, int d_v,
                    const Ahead& ahead) {
  int d = 0;
  for (; d + kMaxGroups * kLanes <= d_v; d += kMaxGroups * kLanes) {
    accumulate<kValues, R, kMaxGroups>(values, mask, any, all, p, rescale, acc, d_v, d, ahead);
  }
  if constexpr (kMaxGroups > 1) {
    for (; d < d_v; d += kLanes)
      accumulate<kValues, R, 1>(values, mask, any, all, p, rescale, acc, d_v, d, ahead);
  }
}

// Folds the kLanes sums of l of each row into lane 0.
BASIN_INLINE void fold_lanes(int rows, float* l) {
  for (int r = 0; r < rows; ++r, l += kLanes) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) l[i] += l[i + half];
    }
  }
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET
