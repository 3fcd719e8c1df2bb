// The bulk tensor copy engine: boxes of a 4-D tensor into shared memory and back. Also asynchronous copies of single threads and
// the stores of matrices that it reads.
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

/// Stores the box at (column, head, token, page) from `source`; rows and columns outside the tensor are not written. The
/// writer of `source` fences (fence_proxy_async) before.
__device__ __forceinline__ void tma_store(const void* source, const CUtensorMap* map, int column, int head,
                                          int token, int page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(source)), "r"(column), "r"(head), "r"(token), "r"(page)
      : "memory");
}
/// Closes the group of stores that this thread started.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until this thread's stores have read their source.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Loads `bytes` contiguous bytes (a multiple of 16, as both addresses are); they are counted on `barrier`.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, std::uint32_t bytes,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Starts a copy of 16 bytes from global to shared memory, past the L1 cache.
__device__ __forceinline__ void copy_async(void* destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(destination)), "l"(source)
               : "memory");
}
/// Waits for all copies that this thread started.
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Stores four 8 x 8 matrices of 16-bit elements: lanes 8 i to 8 i + 7 point at the rows (16 bytes) of matrix i; register i
/// of lane t holds elements 2 (t % 4) and the next of its row t / 4.
__device__ __forceinline__ void store_matrices(void* row, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace basin::attention::sm90
