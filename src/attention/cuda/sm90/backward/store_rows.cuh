// How accumulators become rows of a gradient: scaled, rounded once, 16 bytes at a time.
#pragma once

#include "attention/cuda/sm90/ptx/math.cuh"

namespace basin::attention::sm90 {

/// Four lanes of a quad hold, in x[i], two columns each of the eight columns of group i. Afterwards lane c holds all eight columns of
/// group c.
__device__ __forceinline__ uint4 gather_quad(const std::uint32_t (&x)[4], int lane) {
  const int c = lane % 4;
  // Two steps of a transposition: exchange with the neighbour in bit 0, then in bit 1.
  const std::uint32_t send0 = c & 1 ? x[0] : x[1], send1 = c & 1 ? x[2] : x[3];
  const std::uint32_t got0 = __shfl_xor_sync(0xffffffffu, send0, 1);
  const std::uint32_t got1 = __shfl_xor_sync(0xffffffffu, send1, 1);
  // Group c & 1 and group 2 + (c & 1), columns of lanes (c & ~1) and (c & ~1) + 1.
  const std::uint32_t a0 = c & 1 ? got0 : x[0], a1 = c & 1 ? x[1] : got0;
  const std::uint32_t b0 = c & 1 ? got1 : x[2], b1 = c & 1 ? x[3] : got1;
  const std::uint32_t far0 = __shfl_xor_sync(0xffffffffu, c & 2 ? a0 : b0, 2);
  const std::uint32_t far1 = __shfl_xor_sync(0xffffffffu, c & 2 ? a1 : b1, 2);
  return c & 2 ? make_uint4(far0, far1, b0, b1) : make_uint4(a0, a1, far0, far1);
}

/// Where rows g and g + 8 of a warp's 16 lie (g = lane / 4), and which of them exist.
template <typename T>
struct RowPair {
  T* first;           // its column 0
  std::int64_t next;  // elements from one row to the next
  bool has_first, has_second;
  int columns;  // that exist
};

/// Stores 32 columns of two rows, from `column` on, which a quad of lanes holds as the tensor cores leave them: in x[4 j] and the
/// next columns 8 j + 2 c and 8 j + 2 c + 1 of the first row, in the two behind them those of the second.
template <typename T>
__device__ __forceinline__ void store_columns(const float (&x)[16], float factor, const RowPair<T>& rows,
                                              int column, int lane) {
  std::uint32_t first[4], second[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    first[j] = pack<T>(__fmul_rn(x[4 * j], factor), __fmul_rn(x[4 * j + 1], factor));
    second[j] = pack<T>(__fmul_rn(x[4 * j + 2], factor), __fmul_rn(x[4 * j + 3], factor));
  }
  const uint4 first_row = gather_quad(first, lane), second_row = gather_quad(second, lane);
  const int own = column + lane % 4 * 8;
  if (own >= rows.columns) return;
  if (rows.has_first) *reinterpret_cast<uint4*>(rows.first + own) = first_row;
  if (rows.has_second) *reinterpret_cast<uint4*>(rows.first + 8 * rows.next + own) = second_row;
}

/// The same for all columns of an accumulator, two for each of kCount / 2 pairs of registers.
template <typename T, int kCount>
__device__ __forceinline__ void store_rows(const float (&x)[kCount], float factor, const RowPair<T>& rows,
                                           int column, int lane) {
#pragma unroll
  for (int group = 0; group < kCount / 16; ++group) {
    float part[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) part[i] = x[16 * group + i];
    store_columns(part, factor, rows, column + 32 * group, lane);
  }
}

}  // namespace basin::attention::sm90
