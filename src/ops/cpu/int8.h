// Products of quantised weights with int8 activations. Rows are unpacked once (blocks.h) and then multiplied with every
// token, so one kernel serves all formats. Integer sums are exact, so only the float part has an order: lanes 0..15 each
// hold the dot of four of 64 elements, scaled by d_w * d_a and summed over groups of 64 ascending; the offsets
// m * (d_a * sum of a) are summed over blocks of 32 by block mod 16. Both are folded 8-4-2-1 and added.
#pragma once

#include "ops/cpu/blocks.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

/// How unpacked bytes q stand for the weights q - bias.
enum class Sign {
  none,    // bias 0
  biased,  // q below 64
  wide,    // q up to 255, bias 128
};

template <typename F>
constexpr Sign sign_of() {
  return F::kBias == 0 ? Sign::none : F::kBias == 128 ? Sign::wide : Sign::biased;
}

// {a, b, c, d}, each for four lanes.
BASIN_INLINE F16 spread(const float* four) {
  F16 r;
#if defined(__AVX512F__)
  const __m512 repeated = _mm512_broadcast_f32x4(_mm_loadu_ps(four));
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  r.part[0].raw = _mm512_permutevar_ps(repeated, which);
#elif defined(__AVX2__)
  const __m256 repeated = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(four));
  r.part[0].raw = _mm256_permutevar_ps(repeated, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
  r.part[1].raw = _mm256_permutevar_ps(repeated, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3));
#else
  alignas(64) float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = four[i / 4];
  r = load(x);
#endif
  return r;
}

// Minus bias times the sum of each four activations: where the dots of a token begin.
struct Start {
#if defined(__AVX512F__)
  __m512i all;
#elif defined(__AVX2__)
  __m256i part[2];
#endif
};

template <Sign kSign>
BASIN_INLINE Start start([[maybe_unused]] const Bytes& a, [[maybe_unused]] int bias) {
  Start r = {};
#if defined(__AVX512F__)
  if constexpr (kSign != Sign::none) {
    const __m512i sum =
        _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(static_cast<char>(bias)), a.all);
    r.all = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
  }
#elif defined(__AVX2__)
  if constexpr (kSign == Sign::biased) {
    unroll<2>([&](auto i) BASIN_LAMBDA {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(static_cast<char>(bias)), a.part[i]);
      r.part[i] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    });
  }
#endif
  return r;
}

// Lane i = sum of (q - bias) a over elements 4 i .. 4 i + 3, as float (exact: below 2^24).
template <Sign kSign>
BASIN_INLINE F16 dot(const Bytes& q, const Bytes& a, [[maybe_unused]] const Start& from,
                     [[maybe_unused]] int bias) {
  F16 r;
#if defined(__AVX512F__)
  r.part[0].raw = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(from.all, q.all, a.all));
#elif defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  unroll<2>([&](auto i) BASIN_LAMBDA {
    if constexpr (kSign == Sign::wide) {
      // As magnitude and sign, for two products must fit into 16 bits: 2 * 128 * 127 < 32768.
      const __m256i w = _mm256_xor_si256(q.part[i], _mm256_set1_epi8(-128));
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a.part[i], w));
      r.part[i].raw = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
    } else {
      const __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(q.part[i], a.part[i]), ones);
      r.part[i].raw = _mm256_cvtepi32_ps(kSign == Sign::none ? sum : _mm256_add_epi32(sum, from.part[i]));
    }
  });
#else
  alignas(64) float x[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    int sum = 0;
    for (int n = 4 * i; n < 4 * i + 4; ++n)
      sum += (static_cast<int>(q.element[n]) - bias) * static_cast<std::int8_t>(a.element[n]);
    x[i] = static_cast<float>(sum);
  }
  r = load(x);
#endif
  return r;
}

/// Unpacked rows of a panel; each part has rows `stride` of its own apart.
struct Rows {
  std::int64_t groups;  // of 64 elements
  int bias;
  std::byte* q;           // [rows, 64 groups]
  float* d;               // [rows, 4 groups]
  float* m;               // [rows, m_stride], zero beyond the last block
  std::int64_t m_stride;  // blocks of 32, rounded up to 16
};

template <typename F>
void unpack_rows(const Panel& panel, std::int64_t row, int count, const Rows& rows) {
  for (int r = 0; r < count; ++r) {
    std::byte* q = rows.q + r * rows.groups * 64;
    float* d = rows.d + r * rows.groups * 4;
    float* m = rows.m + r * rows.m_stride;
    each_group<F>(panel.weight + (row + r) * panel.row_bytes, panel.x.inputs,
                  [&](std::int64_t group, const Bytes& bytes, const float* group_d, const float* group_m)
                      BASIN_LAMBDA {
                        store_bytes(bytes, q + group * 64);
                        __builtin_memcpy(d + group * 4, group_d, 16);
                        if constexpr (F::kHasMin) __builtin_memcpy(m + group * 2, group_m, 8);
                      });
    if constexpr (F::kHasMin) {
      for (std::int64_t b = rows.groups * 2; b < rows.m_stride; ++b) m[b] = 0.0f;
    }
  }
}

// y[t, r] for R rows and T tokens.
template <Sign kSign, int R, int T>
BASIN_INLINE void int8_tile(const Panel& panel, const Rows& rows, std::int64_t row, std::int64_t token) {
  const std::byte* x = panel.x.data + token * panel.x.row_bytes;
  const float* scale = panel.x.scale + token * rows.groups * 4;
  F16 sum[R][T];
  unroll<R>([&](auto r) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { sum[r][t] = set(0.0f); }); });
  for (std::int64_t group = 0; group < rows.groups; ++group) {
    F16 d[R];
    Bytes q[R];
    unroll<R>([&](auto r) BASIN_LAMBDA {
      q[r] = load_bytes(rows.q + (r * rows.groups + group) * 64);
      d[r] = spread(rows.d + (r * rows.groups + group) * 4);
    });
    unroll<T>([&](auto t) BASIN_LAMBDA {
      const F16 d_a = spread(scale + (t * rows.groups + group) * 4);
      const Bytes a = load_bytes(x + t * panel.x.row_bytes + group * 64);
      const Start from = start<kSign>(a, rows.bias);
      unroll<R>([&](auto r) BASIN_LAMBDA {
        sum[r][t] = fma(dot<kSign>(q[r], a, from, rows.bias), mul(d[r], d_a), sum[r][t]);
      });
    });
  }
  finish_tile<R, T>(panel, sum, row, token);
}

// Adds the offsets: y[t, r] += sum over blocks of m * (d_a * sum of a).
template <int R>
BASIN_INLINE void add_offsets(const Panel& panel, const Rows& rows, std::int64_t row, std::int64_t token) {
  const std::int64_t x_blocks = panel.x.padded / kBlock;
  const float* sums = panel.x.scaled_sum + token * x_blocks;
  F16 total[R];
  unroll<R>([&](auto r) BASIN_LAMBDA { total[r] = set(0.0f); });
  const auto step = [&](std::int64_t b, const F16& s) BASIN_LAMBDA {
    unroll<R>([&](auto r)
                  BASIN_LAMBDA { total[r] = fma(load(rows.m + r * rows.m_stride + b), s, total[r]); });
  };
  std::int64_t b = 0;
  for (; b + kLanes <= x_blocks; b += kLanes) step(b, load(sums + b));
  if (b < x_blocks) {
    alignas(64) float rest[kLanes] = {};
    for (std::int64_t i = b; i < x_blocks; ++i) rest[i - b] = sums[i];
    step(b, load(rest));
  }
  float out[R];
  fold_rows<R>([&](auto r) BASIN_LAMBDA -> const F16& { return total[r]; }, out);
  float* y = panel.y + token * panel.y_stride + row;
  unroll<R>([&](auto r) BASIN_LAMBDA { y[r] += out[r]; });
}

// All tokens times R unpacked rows.
template <Sign kSign, int R>
void int8_rows(const Panel& panel, const Rows& rows, std::int64_t row) {
  constexpr int kTokens = kParts == 1 ? 4 : 2;
  std::int64_t t = 0;
  for (; t + kTokens <= panel.x.tokens; t += kTokens) int8_tile<kSign, R, kTokens>(panel, rows, row, t);
  for (; t < panel.x.tokens; ++t) int8_tile<kSign, R, 1>(panel, rows, row, t);
  if constexpr (kSign == Sign::none) {
    for (t = 0; t < panel.x.tokens; ++t) add_offsets<R>(panel, rows, row, t);
  }
}

constexpr int kInt8Rows = kParts == 4 || kParts == 16 ? 2 : 4;

template <Weights kWeights>
void int8_panel(const Panel& panel) {
  using F = Format<kWeights>;
  static_assert(F::kHasMin == (F::kBias == 0));
  Rows rows;
  rows.groups = panel.x.padded / 64;
  rows.bias = F::kBias;
  rows.m_stride = (rows.groups * 2 + kLanes - 1) / kLanes * kLanes;
  rows.q = reinterpret_cast<std::byte*>(panel.scratch);
  rows.d = panel.scratch + kInt8Rows * rows.groups * 16;
  rows.m = rows.d + kInt8Rows * rows.groups * 4;
  std::int64_t row = 0;
  for (; row + kInt8Rows <= panel.rows; row += kInt8Rows) {
    unpack_rows<F>(panel, row, kInt8Rows, rows);
    int8_rows<sign_of<F>(), kInt8Rows>(panel, rows, row);
  }
  for (; row < panel.rows; ++row) {
    unpack_rows<F>(panel, row, 1, rows);
    int8_rows<sign_of<F>(), 1>(panel, rows, row);
  }
}

// One row of activations to int8 blocks. A block with NaN or infinity gets a NaN scale, so that the token's results are NaN.
BASIN_INLINE void quantise_row(const float* x, std::int64_t inputs, std::int64_t padded, bool nibbles,
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
    scaled_sum[b] = d * static_cast<float>(sum);
    float* pair_scale = scale + b / 2 * 4;
    if (!nibbles) {
      pair_scale[b % 2 * 2] = pair_scale[b % 2 * 2 + 1] = d;
      __builtin_memcpy(q + b * kBlock, values, kBlock);
    } else {
      pair_scale[b % 2] = pair_scale[b % 2 + 2] = d;
      std::byte* pair = q + b / 2 * 64 + b % 2 * 16;
      __builtin_memcpy(pair, values, 16);
      __builtin_memcpy(pair + 32, values + 16, 16);
    }
  }
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
