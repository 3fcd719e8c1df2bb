// Arithmetic of query rows in M, shared by prefill and extend. A warpgroup holds 64 rows, a warp 16 of them, a thread rows g and
// g + 8 of its warp's (g = lane / 4) and of each eight keys or columns the two from 2 (lane % 4) on.
#pragma once

#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// Starts S = Q K^T for the first kKeys keys of a tile. Blocks of 64 columns of q and of k lie kQRows and kTile rows apart. `b` is the
/// operand of the keys, which some callers make with fewer instructions than it takes from a pointer.
template <typename T, int kDqk, int kKeys, int kQRows, int kTile>
__device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], const T* q, std::uint64_t b) {
  const std::uint64_t a = swizzled_operand(q, 0);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDqk / kStepKeys; ++step) {
    const int block = step / 4, inside = step % 4 * 32;
    Wgmma<kKeys>::template shared<T, Major::k, Major::k>(s, advance(a, block * kQRows * 128 + inside),
                                                         advance(b, block * kTile * 128 + inside), step != 0);
  }
  wgmma_commit();
}
template <typename T, int kDqk, int kKeys, int kQRows, int kTile>
__device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], const T* q, const T* k) {
  start_scores<T, kDqk, kKeys, kQRows, kTile>(s, q, swizzled_operand(k, 0));
}

/// Starts O += P V for the first kKeys keys of a tile.
template <typename T, int kDv, int kKeys, int kTile, int kSteps>
__device__ __forceinline__ void start_values(float (&o)[kDv / 2], const std::uint32_t (&weights)[kSteps][4],
                                             const T* v) {
  const std::uint64_t b = swizzled_operand(v, kTile * 128);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / kStepKeys; ++step) {
    Wgmma<kDv>::template registers<T, Major::mn>(o, weights[step], advance(b, step * kStepKeys * 128), 1);
  }
  wgmma_commit();
}

/// Which of a thread's columns of a row are visible: bit 2 j + e stands for key `key` + 8 j + e of kKeys keys.
template <int kKeys>
__device__ __forceinline__ std::uint32_t seen_columns(const RowKeys& keys, int key) {
  const auto columns_below = [&](int end) {
    const int n = min(max(end - key, 0), kKeys);
    return n / 8 * 2 + min(n % 8, 2);
  };
  const int begin = columns_below(keys.begin);
  return bit_range(0, columns_below(keys.sink_end)) |
         bit_range(begin, max(columns_below(keys.end) - begin, 0));
}

/// Scores of row r (0 or 1) of a thread become -inf where `seen` has no bit; `x` holds the scores of keys [kFrom, kTo) and
/// others.
template <int kFrom, int kTo, int kCount>
__device__ __forceinline__ void mask_row(float (&x)[kCount], int r, std::uint32_t seen) {
#pragma unroll
  for (int i = 0; i < (kTo - kFrom) / 4; ++i) {
    float& score = x[kFrom / 2 + 4 * (i / 2) + 2 * r + i % 2];
    score = (seen & (1u << i)) != 0 ? score : negative_infinity();
  }
}

/// The largest scores among the keys [kFrom, kTo) of a thread's rows, or of the first alone. Both rows at once, so that one
/// hides the latencies of the other.
template <int kFrom, int kTo, int kThreadRows = 2, int kCount>
__device__ __forceinline__ void row_maxima(const float (&x)[kCount], float (&most)[2]) {
  constexpr int kBegin = kFrom / 2, kEnd = kTo / 2;
  float pairs[2][2];
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) {
    if (i / 2 % 2 >= kThreadRows) continue;
    float& pair = pairs[i / 2 % 2][i % 2];
    pair = i < kBegin + 4 ? x[i] : fmaxf(pair, x[i]);
  }
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) most[r] = fmaxf(pairs[r][0], pairs[r][1]);
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], step));
  }
}

/// The sum of a tile's probabilities for one key mod 8 (element 2 r + e of each group of four), in the order of order.cuh;
/// keys outside [kFrom, kTo) are 0 and add nothing.
template <int kFrom, int kTo, int kCount>
__device__ __forceinline__ float sum_of(const float (&x)[kCount], int element) {
  float quarter[4] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    constexpr int kSecond = 64;  // keys
    const int i = 8 * w + element;
    const bool low = 16 * w >= kFrom && 16 * w < kTo;
    const bool high = kSecond + 16 * w >= kFrom && kSecond + 16 * w < kTo;
    if (low && high) {
      quarter[w] = quarter_sum(x[i], x[i + 4], x[32 + i], x[36 + i]);
    } else if (low) {
      quarter[w] = __fadd_rn(x[i], x[i + 4]);
    } else if (high) {
      quarter[w] = __fadd_rn(x[32 + i], x[36 + i]);
    }
  }
  return tile_sum(quarter[0], quarter[1], quarter[2], quarter[3]);
}

/// The same in every thread; saying so keeps the control of loops in uniform registers.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}
__device__ __forceinline__ TileWalk uniform(const TileWalk& walk) {
  return {uniform(walk.sink_tiles), uniform(walk.first), uniform(walk.last)};
}

}  // namespace basin::attention::sm90
