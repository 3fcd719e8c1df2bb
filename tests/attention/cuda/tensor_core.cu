#include "attention/cuda/tensor_core.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"

namespace basin::attention::cuda_tests {
namespace {

using namespace sm90;

constexpr int kRows = 64, kStep = 16, kThreads = 128;

__device__ unsigned char* aligned_memory() {
  extern __shared__ unsigned char memory[];
  return memory + (1024 - shared_address(memory) % 1024) % 1024;
}

/// The byte at which element (row, k) of an operand of `rows` rows lies.
template <Operand kOperand>
__device__ int place(int row, int k, int rows, int depth) {
  if constexpr (kOperand == Operand::k_major)
    return k / 64 * rows * 128 + row * 128 + ((k % 64 * 2) ^ (row % 8 * 16));
  if constexpr (kOperand == Operand::mn_major)
    return row / 64 * depth * 128 + k * 128 + ((row % 64 * 2) ^ (k % 8 * 16));
  return row / 8 * depth * 16 + k * 16 + row % 8 * 2;
}

template <Operand kOperand>
__device__ std::uint64_t describe(const void* memory, int step, int rows, int depth) {
  if constexpr (kOperand == Operand::k_major)
    return advance(swizzled_operand(memory, 0), step / 4 * rows * 128 + step % 4 * 32);
  if constexpr (kOperand == Operand::mn_major)
    return advance(swizzled_operand(memory, depth * 128), step * kStep * 128);
  return advance(plain_operand(memory, 8 * 16, depth * 16), step * kStep * 16);
}

constexpr Major major(Operand operand) {
  return operand == Operand::k_major ? Major::k : Major::mn;
}

template <typename T, Operand kOperand>
__device__ void copy_in(unsigned char* memory, const T* from, int rows, int depth) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * depth; i += kThreads)
    *reinterpret_cast<T*>(memory + place<kOperand>(i / depth, i % depth, rows, depth)) = from[i];
}

// Where element i of a thread's accumulators belongs (the head of wgmma.cuh).
template <int kColumns>
__device__ int result_index(int i) {
  const int thread = static_cast<int>(threadIdx.x), g = thread / 4 % 8, c = thread % 4;
  return (thread / 32 * 16 + g + 8 * (i / 2 % 2)) * kColumns + 8 * (i / 4) + 2 * c + i % 2;
}

template <typename T, int kColumns, Operand kA, Operand kB>
__global__ void __launch_bounds__(kThreads) product(const __grid_constant__ ProductArguments arguments) {
  const int depth = arguments.depth;
  unsigned char* a_memory = aligned_memory();
  unsigned char* b_memory = a_memory + (depth + 63) / 64 * 128 * kRows;
  const T* a = static_cast<const T*>(arguments.a);
  if constexpr (kA != Operand::registers) copy_in<T, kA>(a_memory, a, kRows, depth);
  copy_in<T, kB>(b_memory, static_cast<const T*>(arguments.b), kColumns, depth);
  float d[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    d[i] = arguments.c == nullptr ? 0.0f : arguments.c[result_index<kColumns>(i)];
  fence_proxy_async();
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x), g = thread / 4 % 8, c = thread % 4;
  const T* fragment = a + (thread / 32 * 16 + g) * depth + 2 * c;
#pragma unroll 1
  for (int step = arguments.first; step < arguments.last; ++step) {
    const int keep = arguments.c != nullptr || step > arguments.first;
    const std::uint64_t b = describe<kB>(b_memory, step, kColumns, depth);
    if constexpr (kA == Operand::registers) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] =
            *reinterpret_cast<const std::uint32_t*>(fragment + step * kStep + i % 2 * 8 * depth + i / 2 * 8);
      wgmma_fence();
      Wgmma<kColumns>::template registers<T, major(kB)>(d, pairs, b, keep);
    } else {
      wgmma_fence();
      Wgmma<kColumns>::template shared<T, major(kA), major(kB)>(d, describe<kA>(a_memory, step, kRows, depth),
                                                                b, keep);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_touch(d);
  }
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) arguments.d[result_index<kColumns>(i)] = d[i];
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    loaded_product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   float* result) {
  constexpr int kColumns = 128, kDepth = 128;
  __shared__ Barrier full;
  unsigned char* a = aligned_memory();
  unsigned char* b = a + kRows * kDepth * 2;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    fence_barrier_init();
    barrier_arrive_expect(&full, (kRows + kColumns) * kDepth * 2);
    for (int block = 0; block < 2; ++block) {
      tma_load(a + block * kRows * 128, &a_map, &full, block * 64, 1, 0, 0, kEvictNormal);
      tma_load(b + block * kColumns * 128, &b_map, &full, block * 64, 1, 0, 0, kEvictNormal);
    }
  }
  __syncthreads();
  barrier_wait(&full, 0);
  float d[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) d[i] = 0.0f;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDepth / kStep; ++step) {
    Wgmma<kColumns>::template shared<T, Major::k, Major::k>(
        d, describe<Operand::k_major>(a, step, kRows, kDepth),
        describe<Operand::k_major>(b, step, kColumns, kDepth), step != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_touch(d);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) result[result_index<kColumns>(i)] = d[i];
}

template <typename T, int kColumns, Operand kA>
const void* with_first(Operand b) {
  if (b == Operand::k_major)
    return reinterpret_cast<const void*>(&product<T, kColumns, kA, Operand::k_major>);
  if (b == Operand::plain) return reinterpret_cast<const void*>(&product<T, kColumns, kA, Operand::plain>);
  if constexpr (kColumns >= 64) {
    if (b == Operand::mn_major)
      return reinterpret_cast<const void*>(&product<T, kColumns, kA, Operand::mn_major>);
  }
  return nullptr;
}

template <typename T, int kColumns>
const void* of_width(Operand a, Operand b) {
  if (a == Operand::k_major) return with_first<T, kColumns, Operand::k_major>(b);
  if (a == Operand::mn_major) return with_first<T, kColumns, Operand::mn_major>(b);
  return a == Operand::registers ? with_first<T, kColumns, Operand::registers>(b) : nullptr;
}

template <typename T>
const void* of_type(int columns, Operand a, Operand b) {
  switch (columns) {
    case 8:
      return of_width<T, 8>(a, b);
    case 16:
      return of_width<T, 16>(a, b);
    case 32:
      return of_width<T, 32>(a, b);
    case 64:
      return of_width<T, 64>(a, b);
    case 128:
      return of_width<T, 128>(a, b);
    case 256:
      return of_width<T, 256>(a, b);
    default:
      return nullptr;
  }
}

}  // namespace

const void* product_kernel(DType dtype, int columns, Operand a, Operand b) {
  return dtype == DType::bf16 ? of_type<__nv_bfloat16>(columns, a, b) : of_type<__half>(columns, a, b);
}

const void* loaded_product_kernel(DType dtype) {
  return dtype == DType::bf16 ? reinterpret_cast<const void*>(&loaded_product<__nv_bfloat16>)
                              : reinterpret_cast<const void*>(&loaded_product<__half>);
}

}  // namespace basin::attention::cuda_tests
