// Compiled once per CPU target (basin_cpu_kernels): no header whose inline functions the linker could share.
#include "cli/ceilings_kernel.h"

#include <hwy/highway.h>

#if defined(BASIN_TARGET_avx512_bf16)
#include <immintrin.h>
#endif

namespace basin::cli::BASIN_TARGET {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// Latency 4 times two ports needs 8 chains; 12 leave room and, with both operands, fit 16 registers.
constexpr int kChains = 12;

float read(const float* data, std::int64_t count) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (std::int64_t i = 0; i < count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, data + i));
    s1 = hn::Add(s1, hn::LoadU(d, data + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, data + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

// acc = acc * 0.5 + 1 stays near 2, so no chain meets denormals or infinities. Without fast-math the compiler may
// neither fold nor reorder it.
float fp32_fma(std::int64_t iterations) {
  const D d;
  const V a = hn::Set(d, 0.5f), b = hn::Set(d, 1.0f);
  V acc[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) acc[c] = hn::Set(d, static_cast<float>(c));
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = hn::MulAdd(acc[c], a, b);
  }
  V sum = acc[0];
  for (int c = 1; c < kChains; ++c) sum = hn::Add(sum, acc[c]);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

#if defined(BASIN_TARGET_avx512_bf16)

float bf16_dot(std::int64_t iterations) {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
  __m512 acc[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps(static_cast<float>(c));
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], a, a);
  }
  __m512 sum = acc[0];
  for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, acc[c]);
  return _mm512_cvtss_f32(sum);
}

float int8_dot(std::int64_t iterations) {
  const __m512i a = _mm512_set1_epi8(1);
  __m512i acc[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_set1_epi32(c);
  for (std::int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbusd_epi32(acc[c], a, a);
  }
  __m512i sum = acc[0];
  for (int c = 1; c < kChains; ++c) sum = _mm512_add_epi32(sum, acc[c]);
  return static_cast<float>(_mm_cvtsi128_si32(_mm512_castsi512_si128(sum)));
}

#endif

}  // namespace
}  // namespace basin::cli::BASIN_TARGET

namespace basin::cli {

CeilingKernels ceiling_kernels(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
  CeilingKernels kernels;
  kernels.read = read;
  kernels.fp32_fma = {fp32_fma, 2 * kChains * static_cast<std::int64_t>(hn::Lanes(D()))};
#if defined(BASIN_TARGET_avx512_bf16)
  kernels.bf16_dot = {bf16_dot, 2 * kChains * 32};
  kernels.int8_dot = {int8_dot, 2 * kChains * 64};
#endif
  return kernels;
}

}  // namespace basin::cli
