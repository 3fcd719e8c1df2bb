// Rows of many segments are folded when everything has been computed, one by one, by all CTAs: the fold of a whole block by the
// CTA that happens to arrive last would be a long tail.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/choose.h"
#include "attention/cuda/sm90/ptx/math.cuh"

namespace basin::attention::sm90 {

/// The blocks of rows whose segments have all been saved. CTAs without other work draw their rows. Nobody waits for a CTA that may
/// not be running: whoever puts a block into the queue looks there before it ends. All counters return to 0.
class FoldQueue {
 public:
  __device__ __forceinline__ FoldQueue(std::uint32_t* counters, int rows)
      : counters_(counters), rows_(rows) {}

  /// Segments of a block that have been saved; once it is in the queue, rows drawn (perhaps more than there are).
  __device__ __forceinline__ std::uint32_t* saved(std::int64_t block) const {
    return counters_ + kTicketCounters + block;
  }

  /// One thread puts a block in, whose counter is 0 again.
  __device__ __forceinline__ void put(std::int64_t block) const {
    counter_write(entry(static_cast<int>(atomicAdd(queued(), 1u))), static_cast<std::uint32_t>(block) + 1);
  }

  /// The next row: block and row of it, which need not exist; block -1 when there is none. All lanes of a warp call it together,
  /// when all that this CTA has put in is there. `expected` blocks will be in the queue in the end.
  __device__ __forceinline__ int2 take(int expected, int lane) {
    if (patience_ == 0) patience_ = clock64() + kPatience;
    int looked = 0;  // blocks that were in the queue
    for (;;) {
      // (One lane, and seldom: the counters belong to those who still compute.)
      std::uint32_t now = 0;
      if (lane == 0) now = counter_read(queued());
      const auto in_queue = static_cast<int>(__shfl_sync(0xffffffffu, now, 0));
      __syncwarp();
      if (in_queue == looked) {
        if (in_queue == expected || __any_sync(0xffffffffu, clock64() > patience_)) return {-1, 0};
        __nanosleep(200);
        continue;
      }
      looked = in_queue;
      // Blocks that have been found empty are not looked at again. CTAs begin at different ones.
      for (; first_ < in_queue; first_ += 32) {
        const int2 row = take_of(in_queue, lane);
        if (row.x >= 0) return row;
        if (in_queue < first_ + 32) break;
      }
    }
  }

  /// Called by the CTA that ends last, one warp.
  __device__ __forceinline__ void reset(int lane) const {
    const auto in_queue = static_cast<int>(counter_read(queued()));
    __syncwarp();
    for (int i = lane; i < in_queue; i += 32) atomicExch(saved(atomicExch(entry(i), 0u) - 1), 0u);
    if (lane == 0) atomicExch(queued(), 0u);
  }

 private:
  static constexpr long long kPatience = 50000;  // cycles that a CTA without work waits for blocks to come

  __device__ __forceinline__ std::uint32_t* queued() const { return counters_ + 2; }
  /// The number of a block, plus 1.
  __device__ __forceinline__ std::uint32_t* entry(int i) const {
    return counters_ + kTicketCounters + kMaxBlocks + i;
  }

  /// A row of the blocks first_ to first_ + 31 of the queue.
  __device__ __forceinline__ int2 take_of(int in_queue, int lane) const {
    const int i = first_ + lane;
    std::uint32_t number = 0;
    bool left = false;
    if (i < in_queue) {
      do {
        number = counter_read(entry(i));
      } while (number == 0);  // its writer is at it
      --number;
      left = static_cast<int>(counter_read(saved(number))) < rows_;
    }
    __syncwarp();
    std::uint32_t blocks = __ballot_sync(0xffffffffu, left);
    while (blocks != 0) {
      // The first block from this CTA's place on, around the end.
      const std::uint32_t from = blocks & (0xffffffffu << blockIdx.x % 32);
      const int owner = __ffs(from != 0 ? from : blocks) - 1;
      const auto block = static_cast<int>(__shfl_sync(0xffffffffu, number, owner));
      int row = 0;
      if (lane == 0) row = static_cast<int>(counter_next(saved(block)));
      row = __shfl_sync(0xffffffffu, row, 0);
      __syncwarp();
      if (row < rows_) return {block, row};
      blocks &= ~(1u << owner);
    }
    return {-1, 0};
  }

  std::uint32_t* const counters_;
  const int rows_;  // of a block, at most
  long long patience_ = 0;
  int first_ = 0;  // of the blocks in the queue that may have rows left
};

}  // namespace basin::attention::sm90
