// Folding saved states of segments: in ascending order, maxima and factors in parallel, only the multiply-adds in series.
#pragma once

#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

namespace basin::attention::sm90 {

/// Folds one row of any number of segments, all saved; kThreads threads call it together. A state is `floats` long: `rows` rows of
/// kDv accumulators, then (m, l) of every row. `memory` has kBytes of shared memory. Every thread ends with
/// `finish(m, l, o)`: o[i] is column i kThreads + thread.
template <int kDv, int kThreads, int kBytes, typename Finish>
__device__ __forceinline__ void fold_row(const float* states, int floats, int rows, int row, int segments,
                                         void* memory, int thread, const Finish& finish) {
  constexpr int kQuads = kDv / 4, kGroups = kThreads / kQuads;
  constexpr int kOwn = (kDv + kThreads - 1) / kThreads;  // columns of a thread
  constexpr int kMost = kBytes / (kDv * 4 + 16) - 1;
  constexpr int kAtOnce = kMost >= 128  ? 128
                          : kMost >= 64 ? 64
                                        : 32;  // segments, at most one for each thread
  struct Staging {
    float4 parts[kAtOnce][kQuads];
    float4 factors[kAtOnce];  // a, b, l times b
    float maxima[kThreads / 32];
  };
  static_assert(kAtOnce <= kThreads && kThreads % kQuads == 0 && sizeof(Staging) <= kBytes);
  auto& staging = *static_cast<Staging*>(memory);
  const int lane = thread % 32, warp = thread / 32;
  float o[kOwn] = {}, l = 0.0f, m = negative_infinity();
#pragma unroll 1
  for (int base = 0; base < segments; base += kAtOnce) {
    const int here = min(segments - base, kAtOnce);
    const float* chunk = states + std::int64_t{base} * floats;
#pragma unroll
    for (int i = 0; i < kAtOnce / kGroups; ++i) {
      const int segment = i * kGroups + thread / kQuads, quad = thread % kQuads;
      if (segment < here)
        copy_async(&staging.parts[segment][quad],
                   chunk + std::int64_t{segment} * floats + row * kDv + 4 * quad);
    }
    float2 sum = make_float2(negative_infinity(), 0.0f);
    if (thread < here)
      sum = __ldcg(reinterpret_cast<const float2*>(chunk + std::int64_t{thread} * floats + rows * kDv) + row);
    float most = sum.x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, most, step);
      if (lane >= step) most = fmaxf(most, other);
    }
    if (lane == 31) staging.maxima[warp] = most;
    named_barrier_sync(1, kThreads);
    float before = m;  // of everything below this warp's segments
    for (int w = 0; w < warp; ++w) before = fmaxf(before, staging.maxima[w]);
    float m_total = __shfl_up_sync(0xffffffffu, most, 1);
    m_total = lane == 0 ? before : fmaxf(before, m_total);
    const Fold factors_here = fold_of(m_total, sum.x);
    if (thread < kAtOnce)
      staging.factors[thread] =
          make_float4(factors_here.a, factors_here.b, __fmul_rn(sum.y, factors_here.b), 0.0f);
    for (int w = 0; w < kThreads / 32; ++w) m = fmaxf(m, staging.maxima[w]);
    copy_async_wait();
    named_barrier_sync(1, kThreads);
#pragma unroll 8
    for (int segment = 0; segment < here; ++segment) {
      const float4 factors = staging.factors[segment];
      const Fold next{0.0f, factors.x, factors.y};
      l = __fmaf_rn(l, factors.x, factors.z);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int column = i * kThreads + thread;
        if (column < kDv)
          o[i] = folded(next, o[i], reinterpret_cast<const float*>(staging.parts[segment])[column]);
      }
    }
    named_barrier_sync(1, kThreads);
  }
  finish(m, l, o);
}

}  // namespace basin::attention::sm90
