// Brings queries, keys and values of one tile into the kernel's format. For the kernel source only.
//
// Keys are transposed so that they lie in lanes: packed[group of 16 keys][step][16 keys], a step being one d (a
// float) or, where the target has dot instructions for bf16, an even d and its successor (a pair in 4 bytes).
#pragma once

#include "attention/cpu/kernel.h"
#include "base/lanes.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

using namespace basin::BASIN_TARGET;  // lanes.h

template <Storage kStorage>
constexpr bool pair_dots() {
#if defined(__AVX512BF16__)
  return kStorage == Storage::bf16;
#else
  return false;
#endif
}

// While it lives, numbers below 2^-126 are zero for this thread where the storage has pair dots, which know no smaller
// ones: so a chain of dots and one of FMAs are the same to the bit.
template <Storage kStorage>
class RoundingOfDots {
 public:
#if defined(__AVX512BF16__)
  RoundingOfDots() : before_(_mm_getcsr()) {
    if constexpr (pair_dots<kStorage>()) _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  }
  ~RoundingOfDots() {
    if constexpr (pair_dots<kStorage>()) _mm_setcsr(before_);
  }
  RoundingOfDots(const RoundingOfDots&) = delete;
  RoundingOfDots& operator=(const RoundingOfDots&) = delete;

 private:
  unsigned before_;
#else
  RoundingOfDots() {}
#endif
};

template <Storage kStorage>
constexpr int steps(int d) {
  return pair_dots<kStorage>() ? d / 2 : d;
}

template <Storage kStorage>
constexpr int stored_bytes() {
  return kStorage == Storage::f32 ? 4 : 2;
}

template <Storage kStorage>
constexpr int step_bytes() {
  return stored_bytes<kStorage>() * (pair_dots<kStorage>() ? 2 : 1);
}

// Row pointers of the keys in `wanted` (bit i = key begin + i), which is not empty. The others, whose pages are not
// looked at, get the row of one of those.
BASIN_INLINE void find_rows(const KeyRows& keys, std::int64_t begin, std::uint64_t wanted,
                            const std::byte* (&row)[kTileKeys]) {
  const auto is_wanted = [&](int i) { return ((wanted >> static_cast<unsigned>(i)) & 1) != 0; };
  if (keys.page_tokens == 0) {
    const std::byte* first = keys.base + begin * keys.row_bytes;
    for (int i = 0; i < kTileKeys; ++i) row[i] = first + i * keys.row_bytes;
  } else {
    std::int64_t page = begin / keys.page_tokens;
    std::int64_t slot = begin % keys.page_tokens;
    for (int i = 0; i < kTileKeys; ++i) {
      if (is_wanted(i)) row[i] = keys.base + keys.pages[page] * keys.page_bytes + slot * keys.row_bytes;
      if (++slot == keys.page_tokens) {
        slot = 0;
        ++page;
      }
    }
  }
  if (~wanted == 0) return;
  const std::byte* other = row[__builtin_ctzll(wanted)];
  for (int i = 0; i < kTileKeys; ++i) {
    if (!is_wanted(i)) row[i] = other;
  }
}

#if defined(__AVX512F__)
// Transposes 16 rows of kColumns (16 or 8) 4-byte words: column[c] holds word c of every row. Meanwhile, evenly spread,
// calls meanwhile(Index<i>(), a register on the way) for i in [0, kMeanwhile).
constexpr int kMeanwhile = 16;
template <int kColumns, typename LoadRow, typename Meanwhile>
BASIN_INLINE void transpose_words(const LoadRow& load_row, Array<F16, kColumns>& column,
                                  const Meanwhile& meanwhile) {
  __m512i a[16], b[16];
  unroll<16>([&](auto i) BASIN_LAMBDA {
    a[i] = load_row(i);
    if constexpr (i % 4 == 3) meanwhile(Index<i / 4>(), a[i]);
  });
  unroll<8>([&](auto i) BASIN_LAMBDA {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    if constexpr (i % 2 == 1) meanwhile(Index<4 + i / 2>(), b[2 * i + 1]);
  });
  // a[4 q + c]: in 128-bit lane s, column 4 s + c of rows 4 q .. 4 q + 3.
  unroll<4>([&](auto q) BASIN_LAMBDA {
    a[4 * q] = _mm512_unpacklo_epi64(b[4 * q], b[4 * q + 2]);
    a[4 * q + 1] = _mm512_unpackhi_epi64(b[4 * q], b[4 * q + 2]);
    a[4 * q + 2] = _mm512_unpacklo_epi64(b[4 * q + 1], b[4 * q + 3]);
    a[4 * q + 3] = _mm512_unpackhi_epi64(b[4 * q + 1], b[4 * q + 3]);
    meanwhile(Index<8 + q>(), a[4 * q + 3]);
  });
  unroll<4>([&](auto c) BASIN_LAMBDA {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);  // lanes 0 1 of rows 0-3, of rows 4-7
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
    column[c].part[0].raw = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low01, low23, 0x88));
    column[4 + c].part[0].raw = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low01, low23, 0xdd));
    if constexpr (kColumns == 16) {
      const __m512i high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);  // lanes 2 3
      const __m512i high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
      column[8 + c].part[0].raw = _mm512_castsi512_ps(_mm512_shuffle_i32x4(high01, high23, 0x88));
      column[12 + c].part[0].raw = _mm512_castsi512_ps(_mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
    meanwhile(Index<12 + c>(), column[4 + c].part[0].raw);
  });
}

// kColumns (16 or 8) steps of one key, one per 4 bytes.
template <Storage kStorage, int kColumns>
BASIN_INLINE __m512i load_steps(const std::byte* p) {
  if constexpr (kStorage == Storage::f32 || pair_dots<kStorage>()) {
    return load_masked<std::uint32_t>(kColumns == 16 ? __mmask16{0xffff} : __mmask16{0xff}, p);
  } else {
    return _mm512_castps_si512(load_stored<kStorage>(p).part[0].raw);
  }
}

// Calls body(s, Index<kColumns>()) for steps [s, s + kColumns), ascending; n is a multiple of 8.
template <typename Body>
BASIN_INLINE void each_columns(int n, const Body& body) {
  int s = 0;
  for (; s + 16 <= n; s += 16) body(s, Index<16>());
  if (s < n) body(s, Index<8>());
}

// One group of 16 keys, `offset` bytes after each row pointer. out[steps][16].
template <Storage kStorage>
BASIN_INLINE void pack_group(const std::byte* const* row, std::ptrdiff_t offset, int d, float* out) {
  each_columns(steps<kStorage>(d), [&](int s, auto columns) BASIN_LAMBDA {
    Array<F16, columns> column;
    transpose_words<columns>(
        [&](auto i) BASIN_LAMBDA {
          return load_steps<kStorage, columns>(row[i] + offset + step_bytes<kStorage>() * s);
        },
        column, [](auto, auto&) {});
    unroll<columns>([&](auto c) BASIN_LAMBDA { store(column[c], out + kLanes * (s + c)); });
  });
}
#else
// The same, four keys by four steps at a time.
template <Storage kStorage>
BASIN_INLINE void pack_group(const std::byte* const* row, std::ptrdiff_t offset, int d, float* out) {
  alignas(64) float wide[4][16];
  for (int key = 0; key < kLanes; key += 4) {
    for (int s = 0; s < d; s += 16) {
      for (int i = 0; i < 4; ++i) {
        store(load_stored<kStorage>(row[key + i] + offset + stored_bytes<kStorage>() * s), wide[i]);
      }
#if HWY_TARGET == HWY_SCALAR
      for (int c = 0; c < 16; ++c) {
        for (int i = 0; i < 4; ++i) out[16 * (s + c) + key + i] = wide[i][c];
      }
#else
      const hn::FixedTag<float, 4> d4;
      const hn::FixedTag<double, 2> d2;
      for (int c = 0; c < 16; c += 4) {
        const auto r0 = hn::Load(d4, wide[0] + c), r1 = hn::Load(d4, wide[1] + c);
        const auto r2 = hn::Load(d4, wide[2] + c), r3 = hn::Load(d4, wide[3] + c);
        const auto low01 = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));
        const auto low23 = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));
        const auto high01 = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
        const auto high23 = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
        float* to = out + 16 * (s + c) + key;
        hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, low01, low23)), d4, to);
        hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, low01, low23)), d4, to + 16);
        hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, high01, high23)), d4, to + 32);
        hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, high01, high23)), d4, to + 48);
      }
#endif
    }
  }
}
#endif

// Values as floats: out[key][d_v], `offset` bytes after each row pointer.
template <Storage kStorage>
BASIN_INLINE void widen_values(const std::byte* const* row, std::ptrdiff_t offset, int d_v, float* out) {
  for (int key = 0; key < kTileKeys; ++key) {
    float* to = out + static_cast<std::ptrdiff_t>(key) * d_v;
    for (int c = 0; c < d_v; c += kLanes)
      store(load_stored<kStorage>(row[key] + offset + stored_bytes<kStorage>() * c), to + c);
  }
}

// Values as pairs for VDPBF16PS: out[pair][d_v], a word holding key 2 pair in its upper half and key 2 pair + 1 in its
// lower one. The instruction multiplies and adds upper halves first, each with a rounding of its own, so that a chain
// of pairs is the chain of FMAs over ascending keys.
BASIN_INLINE void pair_values([[maybe_unused]] const std::byte* const* row, [[maybe_unused]] int d_v,
                              [[maybe_unused]] float* out) {
#if defined(__AVX512BF16__)
  const __m512i first_then_second =
      _mm512_set_epi16(15, 47, 14, 46, 13, 45, 12, 44, 11, 43, 10, 42, 9, 41, 8, 40, 7, 39, 6, 38, 5, 37, 4,
                       36, 3, 35, 2, 34, 1, 33, 0, 32);
  for (int pair = 0; pair < kTileKeys / 2; ++pair) {
    const std::byte* first = row[2 * pair];
    const std::byte* second = row[2 * pair + 1];
    for (int c = 0; c < d_v; c += kLanes, out += kLanes) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + 2 * c));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second + 2 * c));
      _mm512_store_si512(out, _mm512_permutex2var_epi16(_mm512_castsi256_si512(a), first_then_second,
                                                        _mm512_castsi256_si512(b)));
    }
  }
#endif
}

template <Storage kStorage>
void pack_queries(int d, int rows, const std::byte* const* row, float* out) {
  for (int r = 0; r < rows; ++r) {
    if constexpr (pair_dots<kStorage>()) {
      __builtin_memcpy(out + static_cast<std::ptrdiff_t>(r) * (d / 2), row[r],
                       2 * static_cast<std::size_t>(d));
    } else {
      float* to = out + static_cast<std::ptrdiff_t>(r) * d;
      for (int c = 0; c < d; c += kLanes)
        store(load_stored<kStorage>(row[r] + stored_bytes<kStorage>() * c), to + c);
    }
  }
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET
