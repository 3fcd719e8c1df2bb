// Sixteen float lanes, for ops' kernel sources, and what products need beside them.
#pragma once

#include <cstring>

#include "base/lanes.h"
#include "ops/cpu/kernel.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

using namespace basin::BASIN_TARGET;  // lanes.h

constexpr int kCacheLine = 64;

// Sixteen floats of which the first `count` exist; the others are `fill`.
BASIN_INLINE F16 load_some(const float* p, std::int64_t count, float fill) {
  alignas(64) float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = i < count ? p[i] : fill;
  return load(x);
}
BASIN_INLINE void store_some(const F16& v, float* p, std::int64_t count) {
  alignas(64) float x[kLanes];
  store(v, x);
  for (int i = 0; i < count; ++i) p[i] = x[i];
}

// The sum of the lanes, folded 8-4-2-1.
BASIN_INLINE float fold(const F16& a) {
  alignas(64) float x[kLanes];
  store(a, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

// Four folds at once: the same additions in the same order.
BASIN_INLINE void fold4(const F16& a, const F16& b, const F16& c, const F16& d, float* out) {
#if defined(__AVX2__)
  const auto to4 = [](const F16& v) BASIN_LAMBDA {
#if defined(__AVX512F__)
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(v.part[0].raw), _mm512_extractf32x8_ps(v.part[0].raw, 1));
#else
    const __m256 eight = _mm256_add_ps(v.part[0].raw, v.part[1].raw);
#endif
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  };
  const __m128 a4 = to4(a), b4 = to4(b), c4 = to4(c), d4 = to4(d);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a4, b4), _mm_unpackhi_ps(a4, b4));  // a02 b02 a13 b13
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c4, d4), _mm_unpackhi_ps(c4, d4));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
#else
  out[0] = fold(a);
  out[1] = fold(b);
  out[2] = fold(c);
  out[3] = fold(d);
#endif
}

// out[r] = the folded sum_of(Index<r>()).
template <int R, typename SumOf>
BASIN_INLINE void fold_rows(const SumOf& sum_of, float (&out)[R]) {
  if constexpr (R == 4) {
    fold4(sum_of(Index<0>()), sum_of(Index<1>()), sum_of(Index<2>()), sum_of(Index<3>()), out);
  } else {
    unroll<R>([&](auto r) BASIN_LAMBDA { out[r] = fold(sum_of(r)); });
  }
}

// y[t, r] = the folded sum[r][t], and the bias.
template <int R, int T>
BASIN_INLINE void finish_tile(const Panel& panel, const F16 (&sum)[R][T], std::int64_t row,
                              std::int64_t token) {
  unroll<T>([&](auto t) BASIN_LAMBDA {
    float out[R];
    fold_rows<R>([&](auto r) BASIN_LAMBDA -> const F16& { return sum[r][t]; }, out);
    float* y = panel.y + (token + t) * panel.y_stride + row;
    unroll<R>([&](auto r)
                  BASIN_LAMBDA { y[r] = panel.bias == nullptr ? out[r] : out[r] + panel.bias[row + r]; });
  });
}

// A stored half as float, without calling a shared inline function.
BASIN_INLINE float half_to_float(const std::byte* p) {
  std::uint16_t h;
  __builtin_memcpy(&h, p, 2);
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  std::uint32_t bits = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00u) {
    bits |= 0x7f800000u;
    __builtin_memcpy(&value, &bits, 4);
  } else {
    __builtin_memcpy(&value, &bits, 4);
    value *= 0x1p112f;  // exact, subnormals included
  }
  return sign != 0 ? -value : value;
#endif
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
