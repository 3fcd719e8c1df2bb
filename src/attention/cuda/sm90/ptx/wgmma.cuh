// wgmma: one warpgroup (128 threads) multiplies a 64 x 16 tile by a 16 x N tile into 64 x N fp32 accumulators.
//
// Accumulator of thread t (warp w = t / 32 % 4, g = t / 4 % 8, c = t % 4), element i of N / 2:
//   row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2 c + i % 2.
// A operand in registers, element pairs: {row g, k 2c}, {row g + 8, k 2c}, {row g, k 2c + 8}, {row g + 8, k 2c + 8}.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda/sm90/ptx/barrier.cuh"

namespace basin::attention::sm90 {

/// Orders register accesses before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Tells the compiler that `registers` change at this point (a wgmma that it cannot see into is still writing them).
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void wgmma_touch(std::uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

enum class Major { k, mn };  // which index of an operand in shared memory is contiguous

/// Describes an operand whose rows of 128 bytes lie in the 128-byte swizzle that the copy engine writes.
/// `block_bytes`: distance between blocks of 64 contiguous elements (Major::mn wider than 64 only).
__device__ __forceinline__ std::uint64_t swizzled_operand(const void* address, std::uint32_t block_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{8 * 128 >> 4} << 32;
  return kSwizzle128 | kEightRows | (std::uint64_t{block_bytes >> 4} << 16) |
         ((shared_address(address) & 0x3FFFFu) >> 4);
}

/// Describes an MN-major operand without swizzle: 8 x 8 cores of 128 bytes (8 rows of k, 8 contiguous mn).
__device__ __forceinline__ std::uint64_t plain_operand(const void* address, std::uint32_t k_bytes,
                                                       std::uint32_t mn_bytes) {
  return (std::uint64_t{mn_bytes >> 4} << 32) | (std::uint64_t{k_bytes >> 4} << 16) |
         ((shared_address(address) & 0x3FFFFu) >> 4);
}

/// The descriptor `bytes` further on. Adding to the address field never carries: shared memory ends below 2^18.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t operand, std::uint32_t bytes) {
  return operand + (bytes >> 4);
}

template <int kColumns>
struct Wgmma;  // one specialisation for each N below

// The instruction text for N columns (R = N / 2 registers), for both element types.
#define BASIN_WGMMA_SS(TYPE, N, REGISTERS, A, B, KEEP, TA, TB, ...)                                          \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP                                                \
               ", 0;\n"                                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B \
               ", keep, 1, 1, " TA ", " TB ";\n}\n"                                                          \
               : __VA_ARGS__                                                                                 \
               : "l"(a), "l"(b), "r"(keep), "n"(int{kMajorA == Major::mn}), "n"(int{kMajorB == Major::mn}))
#define BASIN_WGMMA_RS(TYPE, N, REGISTERS, A0, A1, A2, A3, B, KEEP, TB, ...)                            \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP                                           \
               ", 0;\n"                                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {" A0 \
               ", " A1 ", " A2 ", " A3 "}, " B ", keep, 1, 1, " TB ";\n}\n"                             \
               : __VA_ARGS__                                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep),                         \
                 "n"(int{kMajorB == Major::mn}))

#define BASIN_R4 "%0, %1, %2, %3"
#define BASIN_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BASIN_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define BASIN_D8(d, i) BASIN_D4(d, i), BASIN_D4(d, i + 4)
#define BASIN_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BASIN_D16(d, i) BASIN_D8(d, i), BASIN_D8(d, i + 8)
#define BASIN_R32                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BASIN_D32(d, i) BASIN_D16(d, i), BASIN_D16(d, i + 16)
#define BASIN_R64                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BASIN_D64(d, i) BASIN_D32(d, i), BASIN_D32(d, i + 32)
#define BASIN_R96                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BASIN_D96(d, i) BASIN_D64(d, i), BASIN_D32(d, i + 64)
#define BASIN_R128                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define BASIN_D128(d, i) BASIN_D64(d, i), BASIN_D64(d, i + 64)

template <>
struct Wgmma<8> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[4], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 8, BASIN_R4, "%4", "%5", "%6", "%7", "%8", BASIN_D4(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 8, BASIN_R4, "%4", "%5", "%6", "%7", "%8", BASIN_D4(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[4], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 8, BASIN_R4, "%4", "%5", "%6", "%7", "%8", "%9", "%10", BASIN_D4(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 8, BASIN_R4, "%4", "%5", "%6", "%7", "%8", "%9", "%10", BASIN_D4(d, 0));
    }
  }
};

template <>
struct Wgmma<16> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[8], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 16, BASIN_R8, "%8", "%9", "%10", "%11", "%12", BASIN_D8(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 16, BASIN_R8, "%8", "%9", "%10", "%11", "%12", BASIN_D8(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[8], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 16, BASIN_R8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", BASIN_D8(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 16, BASIN_R8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", BASIN_D8(d, 0));
    }
  }
};

template <>
struct Wgmma<32> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[16], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 32, BASIN_R16, "%16", "%17", "%18", "%19", "%20", BASIN_D16(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 32, BASIN_R16, "%16", "%17", "%18", "%19", "%20", BASIN_D16(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[16], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 32, BASIN_R16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", BASIN_D16(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 32, BASIN_R16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", BASIN_D16(d, 0));
    }
  }
};

template <>
struct Wgmma<64> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[32], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 64, BASIN_R32, "%32", "%33", "%34", "%35", "%36", BASIN_D32(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 64, BASIN_R32, "%32", "%33", "%34", "%35", "%36", BASIN_D32(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[32], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 64, BASIN_R32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", BASIN_D32(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 64, BASIN_R32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", BASIN_D32(d, 0));
    }
  }
};

template <>
struct Wgmma<128> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[64], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 128, BASIN_R64, "%64", "%65", "%66", "%67", "%68", BASIN_D64(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 128, BASIN_R64, "%64", "%65", "%66", "%67", "%68", BASIN_D64(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[64], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 128, BASIN_R64, "%64", "%65", "%66", "%67", "%68", "%69", "%70",
                     BASIN_D64(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 128, BASIN_R64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", BASIN_D64(d, 0));
    }
  }
};

template <>
struct Wgmma<192> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[96], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 192, BASIN_R96, "%96", "%97", "%98", "%99", "%100", BASIN_D96(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 192, BASIN_R96, "%96", "%97", "%98", "%99", "%100", BASIN_D96(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[96], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 192, BASIN_R96, "%96", "%97", "%98", "%99", "%100", "%101", "%102",
                     BASIN_D96(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 192, BASIN_R96, "%96", "%97", "%98", "%99", "%100", "%101", "%102",
                     BASIN_D96(d, 0));
    }
  }
};

template <>
struct Wgmma<256> {
  /// d = A B + (keep ? d : 0), A and B in shared memory.
  template <typename T, Major kMajorA, Major kMajorB>
  __device__ __forceinline__ static void shared(float (&d)[128], std::uint64_t a, std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_SS("bf16", 256, BASIN_R128, "%128", "%129", "%130", "%131", "%132", BASIN_D128(d, 0));
    } else {
      BASIN_WGMMA_SS("f16", 256, BASIN_R128, "%128", "%129", "%130", "%131", "%132", BASIN_D128(d, 0));
    }
  }
  /// d = A B + (keep ? d : 0), A in registers.
  template <typename T, Major kMajorB>
  __device__ __forceinline__ static void registers(float (&d)[128], const std::uint32_t (&a)[4],
                                                   std::uint64_t b, int keep) {
    if constexpr (__is_same(T, __nv_bfloat16)) {
      BASIN_WGMMA_RS("bf16", 256, BASIN_R128, "%128", "%129", "%130", "%131", "%132", "%133", "%134",
                     BASIN_D128(d, 0));
    } else {
      BASIN_WGMMA_RS("f16", 256, BASIN_R128, "%128", "%129", "%130", "%131", "%132", "%133", "%134",
                     BASIN_D128(d, 0));
    }
  }
};

#undef BASIN_WGMMA_SS
#undef BASIN_WGMMA_RS
#undef BASIN_R4
#undef BASIN_D4
#undef BASIN_R8
#undef BASIN_D8
#undef BASIN_R16
#undef BASIN_D16
#undef BASIN_R32
#undef BASIN_D32
#undef BASIN_R64
#undef BASIN_D64
#undef BASIN_R96
#undef BASIN_D96
#undef BASIN_R128
#undef BASIN_D128

}  // namespace basin::attention::sm90
