// Folding saved states of segments: in ascending order, maxima and factors in parallel, only the multiply-adds in series.
#pragma once

#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

namespace basin::attention::sm90 {

/// Folds one row of any number of segments, all saved; kThreads threads call it together. A state is `floats` long: `rows` rows of
/// kDv accumulators, then (m, l) of every row. `memory` has fold_bytes(kDv, at_once), and at_once is kThreads at most. Every
/// thread ends with `finish(m, l, o)`: o[i] is column i kThreads + thread.
template <int kDv, int kThreads, typename Finish>
__device__ __forceinline__ void fold_row(const float* states, int floats, int rows, int row, int segments,
                                         void* memory, int at_once, int thread, const Finish& finish) {
  constexpr int kQuads = kDv / 4;
  constexpr int kOwn = (kDv + kThreads - 1) / kThreads;  // columns of a thread
  const auto sync = [] {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      named_barrier_sync(1, kThreads);
    }
  };
  auto* parts = static_cast<float4*>(memory);                  // [at_once][kQuads]
  float4* factors = parts + at_once * kQuads;                  // [at_once] a, b, l times b
  auto* maxima = reinterpret_cast<float*>(factors + at_once);  // [kThreads / 32]
  const int lane = thread % 32, warp = thread / 32;
  float o[kOwn] = {}, l = 0.0f, m = negative_infinity();
#pragma unroll 1
  for (int base = 0; base < segments; base += at_once) {
    const int here = min(segments - base, at_once);
    const float* chunk = states + std::int64_t{base} * floats;
#pragma unroll 4
    for (int i = thread; i < here * kQuads; i += kThreads) {
      copy_async(parts + i, chunk + std::int64_t{i / kQuads} * floats + row * kDv + i % kQuads * 4);
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
    if (lane == 31) maxima[warp] = most;
    sync();
    float before = m;  // of everything below this warp's segments
    for (int w = 0; w < warp; ++w) before = fmaxf(before, maxima[w]);
    float m_total = __shfl_up_sync(0xffffffffu, most, 1);
    m_total = lane == 0 ? before : fmaxf(before, m_total);
    const Fold factors_here = fold_of(m_total, sum.x);
    if (thread < here)
      factors[thread] = make_float4(factors_here.a, factors_here.b, __fmul_rn(sum.y, factors_here.b), 0.0f);
    for (int w = 0; w < kThreads / 32; ++w) m = fmaxf(m, maxima[w]);
    copy_async_wait();
    sync();
#pragma unroll 8
    for (int segment = 0; segment < here; ++segment) {
      const float4 f = factors[segment];
      const Fold next{0.0f, f.x, f.y};
      l = __fmaf_rn(l, f.x, f.z);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int column = i * kThreads + thread;
        if (column < kDv)
          o[i] = folded(next, o[i], reinterpret_cast<const float*>(parts + segment * kQuads)[column]);
      }
    }
    sync();
  }
  finish(m, l, o);
}

}  // namespace basin::attention::sm90
