// Sixteen 4-byte words, one of each of sixteen weight rows: what quantised weights become so that outputs lie in lanes. A
// word is four consecutive elements of its row as bytes, the integer that sums their products, or part of a block's scales.
#pragma once

#include "ops/cpu/vec.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

constexpr int kGroupRows = kLanes;  // rows that are unpacked together
constexpr int kWordsBytes = 4 * kLanes;

struct Words {
#if defined(__AVX512F__)
  __m512i all;
#elif defined(__AVX2__)
  __m256i part[2];
#else
  std::uint32_t element[kLanes];
#endif
};

// Of every register (or element), what f makes of it; f sees a register of `a`.
template <typename F>
BASIN_INLINE Words each_register([[maybe_unused]] const F& f) {
  Words r;
#if defined(__AVX512F__)
  r.all = f(Index<0>());
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA { r.part[i] = f(i); });
#else
  for (int i = 0; i < kLanes; ++i) r.element[i] = f(i);
#endif
  return r;
}

BASIN_INLINE Words set_words(std::uint32_t x) {
#if defined(__AVX512F__)
  return {_mm512_set1_epi32(static_cast<int>(x))};
#elif defined(__AVX2__)
  return each_register([&](auto) BASIN_LAMBDA { return _mm256_set1_epi32(static_cast<int>(x)); });
#else
  return each_register([&](int) { return x; });
#endif
}

BASIN_INLINE Words load_words(const void* p) {
#if defined(__AVX512F__)
  return {_mm512_loadu_si512(p)};
#elif defined(__AVX2__)
  return each_register([&](auto i)
                           BASIN_LAMBDA { return _mm256_loadu_si256(static_cast<const __m256i*>(p) + i); });
#else
  Words r;
  __builtin_memcpy(r.element, p, kWordsBytes);
  return r;
#endif
}

BASIN_INLINE void store_words(const Words& a, void* p) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(p, a.all);
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA { _mm256_storeu_si256(static_cast<__m256i*>(p) + i, a.part[i]); });
#else
  __builtin_memcpy(p, a.element, kWordsBytes);
#endif
}

BASIN_INLINE Words operator&(const Words& a, const Words& b) {
#if defined(__AVX512F__)
  return {_mm512_and_si512(a.all, b.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_and_si256(a.part[i], b.part[i]); });
#else
  return each_register([&](int i) { return a.element[i] & b.element[i]; });
#endif
}

BASIN_INLINE Words operator|(const Words& a, const Words& b) {
#if defined(__AVX512F__)
  return {_mm512_or_si512(a.all, b.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_or_si256(a.part[i], b.part[i]); });
#else
  return each_register([&](int i) { return a.element[i] | b.element[i]; });
#endif
}

BASIN_INLINE Words operator^(const Words& a, const Words& b) {
#if defined(__AVX512F__)
  return {_mm512_xor_si512(a.all, b.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_xor_si256(a.part[i], b.part[i]); });
#else
  return each_register([&](int i) { return a.element[i] ^ b.element[i]; });
#endif
}

BASIN_INLINE Words operator+(const Words& a, const Words& b) {
#if defined(__AVX512F__)
  return {_mm512_add_epi32(a.all, b.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_add_epi32(a.part[i], b.part[i]); });
#else
  return each_register([&](int i) { return a.element[i] + b.element[i]; });
#endif
}

BASIN_INLINE Words operator*(const Words& a, const Words& b) {
#if defined(__AVX512F__)
  return {_mm512_mullo_epi32(a.all, b.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_mullo_epi32(a.part[i], b.part[i]); });
#else
  return each_register([&](int i) { return a.element[i] * b.element[i]; });
#endif
}

template <int kShift>
BASIN_INLINE Words shift_right(const Words& a) {
#if defined(__AVX512F__)
  return {_mm512_srli_epi32(a.all, kShift)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_srli_epi32(a.part[i], kShift); });
#else
  return each_register([&](int i) { return a.element[i] >> kShift; });
#endif
}

template <int kShift>
BASIN_INLINE Words shift_left(const Words& a) {
#if defined(__AVX512F__)
  return {_mm512_slli_epi32(a.all, kShift)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_slli_epi32(a.part[i], kShift); });
#else
  return each_register([&](int i) { return a.element[i] << kShift; });
#endif
}

// (word >> kShift) & mask, the mask being four times kMask.
template <int kShift, std::uint32_t kMask>
BASIN_INLINE Words field(const Words& a) {
  return shift_right<kShift>(a) & set_words(kMask * 0x01010101u);
}

// table[byte] of each byte; they are below 16.
BASIN_INLINE Words look_up(const std::uint8_t (&table)[16], const Words& a) {
#if defined(__AVX2__)
  const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#endif
#if defined(__AVX512F__)
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), a.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), a.part[i]);
  });
#else
  return each_register([&](int i) {
    std::uint32_t word = 0;
    for (int byte = 0; byte < 4; ++byte)
      word |= static_cast<std::uint32_t>(table[a.element[i] >> (8 * byte) & 15]) << (8 * byte);
    return word;
  });
#endif
}

// Each byte less `bias`, modulo 256.
BASIN_INLINE Words less_bytes(const Words& a, [[maybe_unused]] int bias) {
#if defined(__AVX512F__)
  return {_mm512_sub_epi8(a.all, _mm512_set1_epi8(static_cast<char>(bias)))};
#else
  return a;  // nobody asks
#endif
}

// As signed integers.
BASIN_INLINE F16 to_floats(const Words& a) {
#if defined(__AVX512F__)
  F16 r;
  r.part[0].raw = _mm512_cvtepi32_ps(a.all);
  return r;
#elif defined(__AVX2__)
  return make([&](auto i) BASIN_LAMBDA { return V{_mm256_cvtepi32_ps(a.part[i])}; });
#else
  return make([&](auto i) BASIN_LAMBDA {
    return hn::ConvertTo(D(), hn::LoadU(DI(), reinterpret_cast<const std::int32_t*>(a.element) + i * kWidth));
  });
#endif
}

// The same bits.
BASIN_INLINE F16 as_floats(const Words& a) {
#if defined(__AVX512F__)
  F16 r;
  r.part[0].raw = _mm512_castsi512_ps(a.all);
  return r;
#else
  alignas(64) float x[kLanes];
  store_words(a, x);
  return load(x);
#endif
}

BASIN_INLINE Words as_words(const F16& a) {
#if defined(__AVX512F__)
  return {_mm512_castps_si512(a.part[0].raw)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_castps_si256(a.part[i].raw); });
#else
  alignas(64) float x[kLanes];
  store(a, x);
  return load_words(x);
#endif
}

// The larger of each two, unsigned.
BASIN_INLINE Words larger(const Words& a, const Words& b) {
#if defined(__AVX512F__)
  return {_mm512_max_epu32(a.all, b.all)};
#elif defined(__AVX2__)
  return each_register([&](auto i) BASIN_LAMBDA { return _mm256_max_epu32(a.part[i], b.part[i]); });
#else
  return each_register([&](int i) { return a.element[i] > b.element[i] ? a.element[i] : b.element[i]; });
#endif
}

BASIN_INLINE std::uint32_t largest(const Words& a) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(a.all), _mm512_extracti64x4_epi64(a.all, 1));
#else
  const __m256i eight = _mm256_max_epu32(a.part[0], a.part[1]);
#endif
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
#else
  std::uint32_t most = 0;
  for (const std::uint32_t word : a.element) most = word > most ? word : most;
  return most;
#endif
}

// The lowest byte of each word to p; gives the sum of these bytes, which are signed.
BASIN_INLINE int store_low_bytes(const Words& a, std::byte* p) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8(a.all);
#else
  const __m256i lowest = _mm256_set1_epi32(0xff);
  const __m256i pairs =
      _mm256_packus_epi32(_mm256_and_si256(a.part[0], lowest), _mm256_and_si256(a.part[1], lowest));
  const __m256i in_order = _mm256_permute4x64_epi64(pairs, 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
#endif
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m128i above = _mm_xor_si128(bytes, _mm_set1_epi8(-128));  // and 128, so that none is negative
  const __m128i sums = _mm_sad_epu8(above, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 128 * kLanes;
#else
  int sum = 0;
  for (int i = 0; i < kLanes; ++i) {
    const auto byte = static_cast<std::int8_t>(a.element[i]);
    p[i] = static_cast<std::byte>(byte);
    sum += byte;
  }
  return sum;
#endif
}

// Calls put(Index<c>(), words c of sixteen rows) for the four words from p on; rows are `stride` bytes apart.
template <typename Put>
BASIN_INLINE void transpose(const std::byte* p, std::ptrdiff_t stride, const Put& put) {
#if defined(__AVX2__)
  const auto four = [&](int row) BASIN_LAMBDA {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + row * stride));
  };
#endif
#if defined(__AVX512F__)
  // 128-bit lane l of z[i] is row 4 l + i, so that transposing within the lanes gives the rows in their order.
  __m512i z[4];
  unroll<4>([&](auto i) BASIN_LAMBDA {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(four(i)), four(4 + i), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(four(8 + i)), four(12 + i), 1);
    z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  });
  const __m512i a0 = _mm512_unpacklo_epi32(z[0], z[1]), a1 = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i b0 = _mm512_unpacklo_epi32(z[2], z[3]), b1 = _mm512_unpackhi_epi32(z[2], z[3]);
  put(Index<0>(), Words{_mm512_unpacklo_epi64(a0, b0)});
  put(Index<1>(), Words{_mm512_unpackhi_epi64(a0, b0)});
  put(Index<2>(), Words{_mm512_unpacklo_epi64(a1, b1)});
  put(Index<3>(), Words{_mm512_unpackhi_epi64(a1, b1)});
#elif defined(__AVX2__)
  Words column[4];
  unroll<2>([&](auto half) BASIN_LAMBDA {
    __m256i y[4];
    unroll<4>([&](auto i) BASIN_LAMBDA {
      y[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(four(8 * half + i)), four(8 * half + 4 + i), 1);
    });
    const __m256i a0 = _mm256_unpacklo_epi32(y[0], y[1]), a1 = _mm256_unpackhi_epi32(y[0], y[1]);
    const __m256i b0 = _mm256_unpacklo_epi32(y[2], y[3]), b1 = _mm256_unpackhi_epi32(y[2], y[3]);
    column[0].part[half] = _mm256_unpacklo_epi64(a0, b0);
    column[1].part[half] = _mm256_unpackhi_epi64(a0, b0);
    column[2].part[half] = _mm256_unpacklo_epi64(a1, b1);
    column[3].part[half] = _mm256_unpackhi_epi64(a1, b1);
  });
  unroll<4>([&](auto c) BASIN_LAMBDA { put(c, column[c]); });
#else
  unroll<4>([&](auto c) BASIN_LAMBDA {
    Words column;
    for (int i = 0; i < kLanes; ++i) __builtin_memcpy(&column.element[i], p + i * stride + 4 * c, 4);
    put(c, column);
  });
#endif
}

#if defined(__AVX512F__)
// The same for sixteen words. Every line is read once: rows a multiple of 4 KB apart compete for the same few places of the nearest
// cache.
template <typename Put>
BASIN_INLINE void transpose_line(const std::byte* p, std::ptrdiff_t stride, const Put& put) {
  __m512i a[16], b[16];
  unroll<16>([&](auto i) BASIN_LAMBDA { a[i] = _mm512_loadu_si512(p + i * stride); });
  unroll<8>([&](auto i) BASIN_LAMBDA {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  });
  // a[4 q + c]: in 128-bit lane l, pair 4 l + c of rows 4 q .. 4 q + 3.
  unroll<4>([&](auto q) BASIN_LAMBDA {
    a[4 * q] = _mm512_unpacklo_epi64(b[4 * q], b[4 * q + 2]);
    a[4 * q + 1] = _mm512_unpackhi_epi64(b[4 * q], b[4 * q + 2]);
    a[4 * q + 2] = _mm512_unpacklo_epi64(b[4 * q + 1], b[4 * q + 3]);
    a[4 * q + 3] = _mm512_unpackhi_epi64(b[4 * q + 1], b[4 * q + 3]);
  });
  // b[4 n + c], of rows 8 (n / 2) .. 8 (n / 2) + 7: lanes 0 and 2 of both for even n, 1 and 3 for odd.
  unroll<4>([&](auto c) BASIN_LAMBDA {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
  });
  unroll<4>([&](auto c) BASIN_LAMBDA { put(c, Words{_mm512_shuffle_i32x4(b[c], b[8 + c], 0x88)}); });
  unroll<4>([&](auto c) BASIN_LAMBDA {
    put(Index<4 + c>(), Words{_mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88)});
  });
  unroll<4>([&](auto c)
                BASIN_LAMBDA { put(Index<8 + c>(), Words{_mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd)}); });
  unroll<4>([&](auto c) BASIN_LAMBDA {
    put(Index<12 + c>(), Words{_mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd)});
  });
}
#endif

// The lower halves of the words, which are half floats.
BASIN_INLINE F16 halves(const Words& a) {
#if defined(__AVX512F__)
  F16 r;
  r.part[0].raw = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.all));
  return r;
#else
  alignas(64) std::uint32_t word[kLanes];
  alignas(32) std::uint16_t half[kLanes];
  store_words(a, word);
  for (int i = 0; i < kLanes; ++i) half[i] = static_cast<std::uint16_t>(word[i]);
  return load_stored<Storage::f16>(reinterpret_cast<const std::byte*>(half));
#endif
}

/// How unpacked bytes q stand for the weights q - bias.
enum class Sign {
  none,    // bias 0
  biased,  // q below 64
  wide,    // signed bytes, made unsigned by a bias of 128 where the target multiplies such
};

// Whether sums begin at minus bias times the sum of the activations.
template <Sign kSign>
constexpr bool starts_below() {
#if defined(__AVX512F__)
  return kSign != Sign::none;
#else
  return kSign == Sign::biased;
#endif
}

// Signed bytes as dot() wants them for Sign::wide.
BASIN_INLINE Words signed_bytes(const Words& a) {
#if defined(__AVX512F__)
  return {_mm512_xor_si512(a.all, _mm512_set1_epi8(-128))};
#else
  return a;
#endif
}

// sum + the dot of each word's four bytes with those of x, which are signed.
template <Sign kSign>
BASIN_INLINE Words dot(const Words& sum, const Words& q, std::uint32_t x) {
#if defined(__AVX512F__)
  return {_mm512_dpbusd_epi32(sum.all, q.all, _mm512_set1_epi32(static_cast<int>(x)))};
#elif defined(__AVX2__)
  const __m256i a = _mm256_set1_epi32(static_cast<int>(x));
  return each_register([&](auto i) BASIN_LAMBDA {
    __m256i pairs;
    if constexpr (kSign == Sign::wide) {
      // As magnitude and sign, for two products must fit into 16 bits: 2 * 128 * 127 < 32768.
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q.part[i]), _mm256_sign_epi8(a, q.part[i]));
    } else {
      pairs = _mm256_maddubs_epi16(q.part[i], a);
    }
    return _mm256_add_epi32(sum.part[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  });
#else
  return each_register([&](int i) {
    int total = static_cast<int>(sum.element[i]);
    for (int byte = 0; byte < 4; ++byte) {
      const auto w = static_cast<std::uint8_t>(q.element[i] >> (8 * byte));
      const auto a = static_cast<std::int8_t>(x >> (8 * byte));
      total += (kSign == Sign::wide ? static_cast<int>(static_cast<std::int8_t>(w)) : static_cast<int>(w)) *
               static_cast<int>(a);
    }
    return static_cast<std::uint32_t>(total);
  });
#endif
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
