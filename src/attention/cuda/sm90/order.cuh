// The reduction order on sm_90, and the only place that knows its arithmetic. Prefill, decode, extend and all folds call these
// functions, so they agree bit for bit. Changing anything here changes results: it is a breaking change.
//
// Units: m and x are scores in units of log2 (score * scale * log2 e). Every function is written with explicit rounding.
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/ptx/math.cuh"

namespace basin::attention::sm90 {

inline constexpr int kStepKeys = 16;
/// Keys per update of the running maximum.
constexpr int tile_keys(int d_qk) {
  return d_qk <= 192 ? 128 : 64;
}
/// Keys per segment, the unit that CTAs may share out. Totals of wide heads lie in L2, so they are folded half as often.
constexpr int segment_keys(int d_qk) {
  return d_qk <= 128 ? 1024 : 2048;
}
constexpr int segment_tiles(int d_qk) {
  return segment_keys(d_qk) / tile_keys(d_qk);
}

/// A maximum moves only when a tile exceeds it by this much: P stays below 2^8 and most tiles need no rescaling.
inline constexpr float kMaximumSlack = 8.0f;

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(0xff800000);
}

/// The running maximum of a row after a tile whose largest score is `tile_maximum`.
__device__ __forceinline__ float next_maximum(float m, float tile_maximum) {
  return tile_maximum > __fadd_rn(m, kMaximumSlack) ? tile_maximum : m;
}

/// What is subtracted from scores: m, or 0 while no key has been seen (else -inf - -inf).
__device__ __forceinline__ float shift_of(float m) {
  return m == negative_infinity() ? 0.0f : m;
}

/// Probability of raw score s. Masked scores are -inf and give exactly 0.
__device__ __forceinline__ float probability(float s, float factor, float shift) {
  return exp2_fast(__fmaf_rn(s, factor, -shift));
}

/// The soft cap of a raw score, without its outer factor: tanh(y) with y = s * cap_factor / (2 log2 e). Near 0 the quotient
/// loses digits that the caller multiplies by the cap, so a series takes over.
__device__ __forceinline__ float soft_cap(float s, float cap_factor) {
  constexpr float kHalfLn2 = 0.34657359027997264f;
  const float y2 = __fmul_rn(s, cap_factor);  // in units of log2, doubled
  const float e = exp2_fast(y2);
  const float far = __fmaf_rn(-2.0f, reciprocal_fast(__fadd_rn(e, 1.0f)), 1.0f);
  const float y = __fmul_rn(y2, kHalfLn2);
  const float square = __fmul_rn(y, y);
  float near = __fmaf_rn(square, -17.0f / 315.0f, 2.0f / 15.0f);
  near = __fmaf_rn(near, square, -1.0f / 3.0f);
  near = __fmaf_rn(__fmul_rn(near, square), y, y);
  return fabsf(y) < 0.2f ? near : far;
}

// The sum l of a segment is eight running sums by key mod 8. A tile adds to each the sum of its keys, taken in the
// order of four sixteen-key columns: w-th quarter ((p[16w] + p[16w+8]) + (p[64+16w] + p[64+16w+8])), then
// ((q0 + q1) + (q2 + q3)). A tile of 64 keys has no second half.
__device__ __forceinline__ float quarter_sum(float a, float b, float c, float d) {
  return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
}
__device__ __forceinline__ float tile_sum(float q0, float q1, float q2, float q3) {
  return __fadd_rn(__fadd_rn(q0, q1), __fadd_rn(q2, q3));
}
__device__ __forceinline__ float add_tile(float l, float rescale, float sum) {
  return __fmaf_rn(l, rescale, sum);
}

/// How a segment joins the running total of a row: total = total * a + segment * b.
struct Fold {
  float m;  // the new maximum
  float a;
  float b;
};
__device__ __forceinline__ Fold fold_of(float m_total, float m_segment) {
  const float m = fmaxf(m_total, m_segment);
  const float shift = shift_of(m);
  return {m, exp2_fast(__fadd_rn(m_total, -shift)), exp2_fast(__fadd_rn(m_segment, -shift))};
}
__device__ __forceinline__ float folded(const Fold& fold, float total, float segment) {
  return __fmaf_rn(total, fold.a, __fmul_rn(segment, fold.b));
}

/// The end of a row: the sink joins here and nowhere else.
struct Finish {
  float factor;         // O = factor * acc
  float lse;            // natural log over the keys; -inf without keys
  float lse_with_sink;  // logaddexp(lse, sink_logit)
};
__device__ __forceinline__ Finish finish(float m, float l, float sink_logit) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kLn2 = 0.6931471805599453f;
  const float inf = __int_as_float(0x7f800000);
  // Without keys m is -inf and l is 0; a sink that is +inf in units of log2 (so are the largest finite ones) leaves nothing to
  // the keys. Both are set right at the end.
  const float sink = __fmul_rn(sink_logit, kLog2E);
  const float top = fmaxf(m, sink);
  const float shift = shift_of(top);
  const float weight = exp2_fast(__fadd_rn(m, -shift));
  const float total = __fmaf_rn(l, weight, exp2_fast(__fadd_rn(sink, -shift)));
  Finish row;
  row.factor = __fmul_rn(weight, reciprocal_fast(total));
  row.lse = __fmul_rn(__fadd_rn(m, log2_fast(l)), kLn2);
  row.lse_with_sink = __fmul_rn(__fadd_rn(top, log2_fast(total)), kLn2);
  if (m == -inf) row = {0.0f, -inf, sink_logit};
  if (sink == inf) row.factor = 0.0f, row.lse_with_sink = sink_logit;
  return row;
}

/// One element of the output before rounding to the storage type. Adding +0 makes every zero positive.
__device__ __forceinline__ float output(float acc, float factor) {
  return __fmaf_rn(acc, factor, 0.0f);
}

}  // namespace basin::attention::sm90
