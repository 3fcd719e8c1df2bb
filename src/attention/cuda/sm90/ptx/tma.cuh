// The bulk tensor copy engine: loads of boxes of a 4-D tensor into shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/cuda/sm90/ptx/barrier.cuh"

namespace basin::attention::sm90 {

// What the L2 should do with the lines of a load (createpolicy encodings).
inline constexpr std::uint64_t kEvictFirst = 0x12F0000000000000;
inline constexpr std::uint64_t kEvictNormal = 0x1000000000000000;
inline constexpr std::uint64_t kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Loads the box at (column, head, token, page) into `destination`; the bytes are counted on `barrier`. Rows and columns
/// outside the tensor read as zero.
__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map, Barrier* barrier,
                                         int column, int head, int token, int page, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(token), "r"(page), "l"(policy)
      : "memory");
}

}  // namespace basin::attention::sm90
