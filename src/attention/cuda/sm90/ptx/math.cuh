// Single instructions of the arithmetic, with their rounding spelled out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace basin::attention::sm90 {

/// 2^x on the special-function unit: relative error below 2^-22, -inf gives +0, results below 2^-126 give 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) on the special-function unit: absolute error below 2^-22 near 1, relative 2^-22 elsewhere.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x: relative error below 2^-23, 1 / inf is 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// `count` one bits from bit `first` up; bits beyond 31 fall away.
__device__ __forceinline__ std::uint32_t bit_range(int first, int count) {
  std::uint32_t mask;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(first), "r"(count));
  return mask;
}

/// Rounds two floats to nearest even; `low` lies in the lower half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t bits;
  if constexpr (sizeof(T) == sizeof(__nv_bfloat16) && __is_same(T, __nv_bfloat16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

/// Adds to a counter in global memory with release and acquire order over the whole device; returns the old value.
__device__ __forceinline__ std::uint32_t counter_add(std::uint32_t* counter, std::uint32_t value) {
  std::uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ std::uint32_t counter_next(std::uint32_t* counter) {
  return counter_add(counter, 1);
}
/// Adds to four floats in global memory, each with one rounding; no order with other accesses.
__device__ __forceinline__ void global_add(float4* sum, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

/// Reads a counter, and sees what was written before it was (acquire).
__device__ __forceinline__ std::uint32_t counter_read(const std::uint32_t* counter) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
/// The same without order: for polling, before a counter_read.
__device__ __forceinline__ std::uint32_t counter_peek(const std::uint32_t* counter) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
/// Writes one after everything before (release).
__device__ __forceinline__ void counter_write(std::uint32_t* counter, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

/// The sum of `value` over this lane of the warp and those below it. All lanes call it together.
__device__ __forceinline__ int sum_to_lane(int value, int lane) {
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

/// Tells the compiler that `value` is new at this point, so that nothing derived from it is computed earlier and kept.
__device__ __forceinline__ void recompute_from(int& value) {
  asm volatile("" : "+r"(value));
}

}  // namespace basin::attention::sm90
