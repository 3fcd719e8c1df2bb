// Products of quantised weights with int8 activations. Integer sums are exact, so only the float part has an order:
// lanes 0..15 each hold the dot of four elements of a pair of blocks, scaled by d_w * d_a and summed over pairs
// ascending; q4_1's offsets m * (d_a * sum of a) are summed over blocks by block mod 16. Both are folded 8-4-2-1 and added.
#pragma once

#include "ops/cpu/vec.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

// Where the 64 elements of a pair of blocks lie: q8_0 as stored; q4_1 as [low nibbles of both, high nibbles of both],
// which is how two blocks unpack. kPairLane[i] says which block of the pair lane i belongs to.
template <Weights kWeights>
BASIN_INLINE F16
spread(const float* pair) {  // {a, b} -> a in the lanes of the first block, b in those of the second
#if defined(__AVX512F__)
  double both;
  __builtin_memcpy(&both, pair, 8);
  const __m512 repeated = _mm512_castpd_ps(_mm512_set1_pd(both));
  constexpr int a = 0, b = 1;
  const __m512i which = kWeights == Weights::q8_0
                            ? _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b)
                            : _mm512_setr_epi32(a, a, a, a, b, b, b, b, a, a, a, a, b, b, b, b);
  F16 r;
  r.part[0].raw = _mm512_permutevar_ps(repeated, which);
  return r;
#else
  alignas(64) float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = pair[kWeights == Weights::q8_0 ? i / 8 : i / 4 % 2];
  return load(x);
#endif
}

// 64 unpacked weights of a pair of blocks: q4_1 0..15, q8_0 -128..127.
struct Bytes {
#if defined(__AVX512F__)
  __m512i all;
#elif defined(__AVX2__)
  __m256i part[2];
#else
  std::int8_t element[64];
#endif
};

// `second` may be null (an odd number of blocks): its weights are zero.
template <Weights kWeights>
BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second) {
  Bytes r;
#if defined(__AVX2__)
  if constexpr (kWeights == Weights::q8_0) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + 2));
    const __m256i b = second == nullptr ? _mm256_setzero_si256()
                                        : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second + 2));
#if defined(__AVX512F__)
    r.all = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
#else
    r.part[0] = a;
    r.part[1] = b;
#endif
  } else {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + 4));
    const __m128i b = second == nullptr ? _mm_setzero_si128()
                                        : _mm_loadu_si128(reinterpret_cast<const __m128i*>(second + 4));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    const __m256i high = _mm256_srli_epi16(both, 4);
#if defined(__AVX512F__)
    r.all = _mm512_and_si512(_mm512_inserti64x4(_mm512_castsi256_si512(both), high, 1), _mm512_set1_epi8(15));
#else
    r.part[0] = _mm256_and_si256(both, _mm256_set1_epi8(15));
    r.part[1] = _mm256_and_si256(high, _mm256_set1_epi8(15));
#endif
  }
#else
  const std::byte* source[2] = {first, second};
  for (int b = 0; b < 2; ++b) {
    for (int i = 0; i < kBlock; ++i) {
      int value = 0;
      if (source[b] != nullptr) {
        if constexpr (kWeights == Weights::q8_0) {
          value = static_cast<std::int8_t>(source[b][2 + i]);
        } else {
          const int byte = static_cast<int>(source[b][4 + i % 16]);
          value = i < 16 ? byte & 15 : byte >> 4;
        }
      }
      const int at = kWeights == Weights::q8_0 ? 32 * b + i : 32 * (i / 16) + 16 * b + i % 16;
      r.element[at] = static_cast<std::int8_t>(value);
    }
  }
#endif
  return r;
}

// Lane i = sum of weights 4 i .. 4 i + 3 times activations, as float (exact: below 2^24).
template <Weights kWeights>
BASIN_INLINE F16 dot(const Bytes& w, const std::byte* a) {
  F16 r;
#if defined(__AVX512F__)
  const __m512i x = _mm512_loadu_si512(a);
  if constexpr (kWeights == Weights::q4_1) {
    r.part[0].raw = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w.all, x));
  } else {
    // u8 x s8 with the weight shifted by 128; what that adds, 128 * sum(a), is taken off first.
    const __m512i offset = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), x);
    const __m512i shifted = _mm512_xor_si512(w.all, _mm512_set1_epi8(-128));
    const __m512i sum = _mm512_dpbusd_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), offset), shifted, x);
    r.part[0].raw = _mm512_cvtepi32_ps(sum);
  }
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 32 * i));
    // |w| <= 128 and |a| <= 127, so two products fit into 16 bits: 2 * 128 * 127 < 32768.
    const __m256i magnitude = kWeights == Weights::q4_1 ? w.part[i] : _mm256_abs_epi8(w.part[i]);
    const __m256i signs = kWeights == Weights::q4_1 ? x : _mm256_sign_epi8(x, w.part[i]);
    const __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signs), _mm256_set1_epi16(1));
    r.part[i].raw = _mm256_cvtepi32_ps(sum);
  });
#else
  alignas(64) float x[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    int sum = 0;
    for (int n = 0; n < 4; ++n) sum += w.element[4 * i + n] * static_cast<std::int8_t>(a[4 * i + n]);
    x[i] = static_cast<float>(sum);
  }
  r = load(x);
#endif
  return r;
}

/// Rows of a panel with their scales unpacked: d[r][block] (and m), zero beyond the last block.
struct Rows {
  const std::byte* weight;
  std::int64_t row_bytes;
  std::int64_t blocks;
  std::int64_t padded_blocks;  // multiple of 16
  float* d;                    // [rows, padded_blocks]
  float* m;                    // q4_1: [rows, padded_blocks]
};

template <Weights kWeights>
BASIN_INLINE void unpack_scales(const Rows& rows, int count) {
  for (int r = 0; r < count; ++r) {
    const std::byte* block = rows.weight + r * rows.row_bytes;
    float* d = rows.d + r * rows.padded_blocks;
    float* m = rows.m + r * rows.padded_blocks;
    for (std::int64_t b = 0; b < rows.blocks; ++b, block += block_bytes(kWeights)) {
      if constexpr (kWeights == Weights::q4_1) {
#if defined(__F16C__)
        int both;
        __builtin_memcpy(&both, block, 4);
        const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(both));
        _mm_store_ss(d + b, pair);
        _mm_store_ss(m + b, _mm_movehdup_ps(pair));
#else
        d[b] = half_to_float(block);
        m[b] = half_to_float(block + 2);
#endif
      } else {
        d[b] = half_to_float(block);
      }
    }
    for (std::int64_t b = rows.blocks; b < rows.padded_blocks; ++b) d[b] = 0.0f;
    if (kWeights == Weights::q4_1) {
      for (std::int64_t b = rows.blocks; b < rows.padded_blocks; ++b) m[b] = 0.0f;
    }
  }
}

// y[t, r] for R rows and T tokens.
template <Weights kWeights, int R, int T>
BASIN_INLINE void int8_tile(const Panel& panel, const Rows& rows, std::int64_t row, std::int64_t token) {
  const std::int64_t x_blocks = panel.x.padded / kBlock;
  const std::byte* weight = rows.weight;
  const std::byte* x = panel.x.data + token * panel.x.row_bytes;
  const float* scale = panel.x.scale + token * x_blocks;
  F16 sum[R][T];
  unroll<R>([&](auto r) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { sum[r][t] = set(0.0f); }); });
  const auto step = [&](std::int64_t b, auto odd) BASIN_LAMBDA {
    F16 d[R];
    Bytes w[R];
    unroll<R>([&](auto r) BASIN_LAMBDA {
      const std::byte* first = weight + r * rows.row_bytes + b * block_bytes(kWeights);
      w[r] = unpack<kWeights>(first, odd ? nullptr : first + block_bytes(kWeights));
      d[r] = spread<kWeights>(rows.d + r * rows.padded_blocks + b);
    });
    unroll<T>([&](auto t) BASIN_LAMBDA {
      const F16 d_a = spread<kWeights>(scale + t * x_blocks + b);
      const std::byte* a = x + t * panel.x.row_bytes + b * kBlock;
      unroll<R>([&](auto r)
                    BASIN_LAMBDA { sum[r][t] = fma(dot<kWeights>(w[r], a), mul(d[r], d_a), sum[r][t]); });
    });
  };
  std::int64_t b = 0;
  for (; b + 2 <= rows.blocks; b += 2) step(b, Index<0>());
  if (b < rows.blocks) step(b, Index<1>());
  finish_tile<R, T>(panel, sum, row, token);
}

// Adds q4_1's offsets: y[t, r] += sum over blocks of m * (d_a * sum of a).
template <int R>
BASIN_INLINE void add_offsets(const Panel& panel, const Rows& rows, std::int64_t row, std::int64_t token) {
  const std::int64_t x_blocks = panel.x.padded / kBlock;
  const float* sums = panel.x.scaled_sum + token * x_blocks;
  F16 total[R];
  unroll<R>([&](auto r) BASIN_LAMBDA { total[r] = set(0.0f); });
  std::int64_t b = 0;
  for (; b + kLanes <= x_blocks; b += kLanes) {
    const F16 s = load(sums + b);
    unroll<R>([&](auto r)
                  BASIN_LAMBDA { total[r] = fma(load(rows.m + r * rows.padded_blocks + b), s, total[r]); });
  }
  if (b < x_blocks) {
    alignas(64) float rest[kLanes] = {};
    for (std::int64_t i = b; i < x_blocks; ++i) rest[i - b] = sums[i];
    const F16 s = load(rest);
    unroll<R>([&](auto r)
                  BASIN_LAMBDA { total[r] = fma(load(rows.m + r * rows.padded_blocks + b), s, total[r]); });
  }
  float out[R];
  fold_rows<R>([&](auto r) BASIN_LAMBDA -> const F16& { return total[r]; }, out);
  float* y = panel.y + token * panel.y_stride + row;
  unroll<R>([&](auto r) BASIN_LAMBDA { y[r] += out[r]; });
}

template <Weights kWeights, int R>
void int8_rows(const Panel& panel, std::int64_t row) {
  constexpr int kTokens = kParts == 1 ? 4 : 2;
  Rows rows;
  rows.weight = panel.weight + row * panel.row_bytes;
  rows.row_bytes = panel.row_bytes;
  rows.blocks = panel.x.inputs / kBlock;
  rows.padded_blocks = (rows.blocks + kLanes - 1) / kLanes * kLanes;
  rows.d = panel.scratch;
  rows.m = panel.scratch + R * rows.padded_blocks;
  unpack_scales<kWeights>(rows, R);
  std::int64_t t = 0;
  for (; t + kTokens <= panel.x.tokens; t += kTokens) int8_tile<kWeights, R, kTokens>(panel, rows, row, t);
  for (; t < panel.x.tokens; ++t) int8_tile<kWeights, R, 1>(panel, rows, row, t);
  if constexpr (kWeights == Weights::q4_1) {
    for (t = 0; t < panel.x.tokens; ++t) add_offsets<R>(panel, rows, row, t);
  }
}

template <Weights kWeights>
void int8_panel(const Panel& panel) {
  constexpr int kRows = kParts == 4 || kParts == 16 ? 2 : 4;
  std::int64_t row = 0;
  for (; row + kRows <= panel.rows; row += kRows) int8_rows<kWeights, kRows>(panel, row);
  for (; row < panel.rows; ++row) int8_rows<kWeights, 1>(panel, row);
}

// One row of activations to int8 blocks. A block with NaN or infinity gets a NaN scale, so that the token's results are NaN.
BASIN_INLINE void quantise_row(const float* x, std::int64_t inputs, std::int64_t padded, bool q4_order,
                               std::byte* q, float* scale, float* scaled_sum) {
  for (std::int64_t b = 0; b < padded / kBlock; ++b) {
    std::int8_t values[kBlock] = {};
    float d = 0.0f;
    int sum = 0;
    if (b * kBlock < inputs) {
      const F16 low = load(x + b * kBlock), high = load(x + b * kBlock + kLanes);
      const auto magnitude = [](const F16& a) BASIN_LAMBDA {
        return make([&](auto i) BASIN_LAMBDA { return hn::Abs(a.part[i]); });
      };
      const float largest = max_of_lanes(max(magnitude(low), magnitude(high)));
      // Any NaN or infinity makes x - x a NaN, and so this sum.
      const float check = fold(add(sub(low, low), sub(high, high)));
      if (check != 0.0f) {
        d = __builtin_nanf("");
      } else if (largest > 0.0f) {
        d = largest / 127.0f;
        // 127 / largest overflows for subnormal blocks; they are so small that zero is right to float's range.
        const float inverse = largest >= 0x1p-119f ? 127.0f / largest : 0.0f;
        alignas(64) float scaled[kBlock];
        store(mul(low, set(inverse)), scaled);
        store(mul(high, set(inverse)), scaled + kLanes);
        for (int i = 0; i < kBlock; ++i) {
          const float magic = 0x1.8p23f;  // rounds to an integer, to nearest even
          const int value = static_cast<int>((scaled[i] + magic) - magic);
          values[i] = static_cast<std::int8_t>(value);
          sum += value;
        }
      }
    }
    scale[b] = d;
    scaled_sum[b] = d * static_cast<float>(sum);
    if (!q4_order) {
      __builtin_memcpy(q + b * kBlock, values, kBlock);
    } else {
      std::byte* pair = q + b / 2 * 64 + b % 2 * 16;
      __builtin_memcpy(pair, values, 16);
      __builtin_memcpy(pair + 32, values + 16, 16);
    }
  }
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
