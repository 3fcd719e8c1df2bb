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

template <Storage kStorage>
constexpr int steps(int d) {
  return pair_dots<kStorage>() ? d / 2 : d;
}

template <Storage kStorage>
constexpr int stored_bytes() {
  return kStorage == Storage::f32 ? 4 : 2;
}

// Row pointers of the keys in `wanted` (bit i = key begin + i); null for the others, whose pages are not looked at.
BASIN_INLINE void find_rows(const KeyRows& keys, std::int64_t begin, std::uint64_t wanted,
                            const std::byte* (&row)[kTileKeys]) {
  if (keys.page_tokens == 0) {
    const std::byte* first = keys.base + begin * keys.row_bytes;
    for (int i = 0; i < kTileKeys; ++i) row[i] = first + i * keys.row_bytes;
    if (~wanted == 0) return;
    for (int i = 0; i < kTileKeys; ++i) {
      if (((wanted >> static_cast<unsigned>(i)) & 1) == 0) row[i] = nullptr;
    }
    return;
  }
  std::int64_t page = begin / keys.page_tokens;
  std::int64_t slot = begin % keys.page_tokens;
  for (int i = 0; i < kTileKeys; ++i) {
    const bool want = ((wanted >> static_cast<unsigned>(i)) & 1) != 0;
    row[i] = want ? keys.base + keys.pages[page] * keys.page_bytes + slot * keys.row_bytes : nullptr;
    if (++slot == keys.page_tokens) {
      slot = 0;
      ++page;
    }
  }
}

#if defined(__AVX512F__)
// Transposes 16 rows of `columns` (16 or 8) 4-byte words; a null row counts as zeros. out[column][16].
template <typename LoadRow>
BASIN_INLINE void transpose_words(const LoadRow& load_row, int columns, float* out) {
  __m512i a[16], b[16];
  unroll<16>([&](auto i) BASIN_LAMBDA { a[i] = load_row(i); });
  unroll<8>([&](auto i) BASIN_LAMBDA {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  });
  // a[4 q + c]: in 128-bit lane s, column 4 s + c of rows 4 q .. 4 q + 3.
  unroll<4>([&](auto q) BASIN_LAMBDA {
    a[4 * q] = _mm512_unpacklo_epi64(b[4 * q], b[4 * q + 2]);
    a[4 * q + 1] = _mm512_unpackhi_epi64(b[4 * q], b[4 * q + 2]);
    a[4 * q + 2] = _mm512_unpacklo_epi64(b[4 * q + 1], b[4 * q + 3]);
    a[4 * q + 3] = _mm512_unpackhi_epi64(b[4 * q + 1], b[4 * q + 3]);
  });
  unroll<4>([&](auto c) BASIN_LAMBDA {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);   // lanes 0 1 of rows 0-3, of rows 4-7
    const __m512i high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);  // lanes 2 3
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    _mm512_storeu_si512(out + 16 * c, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_storeu_si512(out + 16 * (4 + c), _mm512_shuffle_i32x4(low01, low23, 0xdd));
    if (columns == 16) {
      _mm512_storeu_si512(out + 16 * (8 + c), _mm512_shuffle_i32x4(high01, high23, 0x88));
      _mm512_storeu_si512(out + 16 * (12 + c), _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
  });
}

// One group of 16 keys, `offset` bytes after each row pointer. out[steps][16].
template <Storage kStorage>
BASIN_INLINE void pack_group(const std::byte* const* row, std::ptrdiff_t offset, int d, float* out) {
  const int n = steps<kStorage>(d);
  for (int s = 0; s < n; s += 16) {
    const int columns = n - s < 16 ? 8 : 16;  // n is a multiple of 8
    transpose_words(
        [&](auto i) BASIN_LAMBDA {
          const std::byte* p = row[i];
          if constexpr (kStorage == Storage::f32 || pair_dots<kStorage>()) {
            const __mmask16 mask = p == nullptr    ? __mmask16{0}
                                   : columns == 16 ? __mmask16{0xffff}
                                                   : __mmask16{0xff};
            return load_masked<std::uint32_t>(mask, p + offset + 4 * s);
          } else {
            return p == nullptr ? _mm512_setzero_si512()
                                : _mm512_castps_si512(load_stored<kStorage>(p + offset + 2 * s).part[0].raw);
          }
        },
        columns, out + 16 * s);
  }
}
#else
// One group of 16 keys, four keys by four steps at a time. out[steps][16].
template <Storage kStorage>
BASIN_INLINE void pack_group(const std::byte* const* row, std::ptrdiff_t offset, int d, float* out) {
  alignas(64) float wide[4][16];
  for (int key = 0; key < kLanes; key += 4) {
    for (int s = 0; s < d; s += 16) {
      for (int i = 0; i < 4; ++i) {
        const std::byte* p = row[key + i];
        store(p == nullptr ? set(0.0f) : load_stored<kStorage>(p + offset + stored_bytes<kStorage>() * s),
              wide[i]);
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

// Values as floats: out[key][d_v] for the keys with a row, `offset` bytes after its pointer.
template <Storage kStorage>
BASIN_INLINE void widen_values(const std::byte* const* row, std::ptrdiff_t offset, int d_v, float* out) {
  for (int key = 0; key < kTileKeys; ++key) {
    const std::byte* p = row[key];
    if (p == nullptr) continue;
    float* to = out + static_cast<std::ptrdiff_t>(key) * d_v;
    for (int c = 0; c < d_v; c += kLanes)
      store(load_stored<kStorage>(p + offset + stored_bytes<kStorage>() * c), to + c);
  }
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
