// Where the row sums of a sequence lie: blocks of kSumRows query rows, none shared by two sequences.
#pragma once

#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/sequence.cuh"

namespace basin::attention::sm90 {

/// The first block of a sequence. A sequence of n rows from row r on has at most (r + n) / kSumRows - r / kSumRows + 1 blocks, so
/// that those of the next one, one further on, are behind them.
__device__ __forceinline__ int first_block(const BackwardArguments& arguments, int sequence) {
  if (arguments.q_begin == nullptr) return sequence * ((arguments.max_q_tokens + kSumRows - 1) / kSumRows);
  return __ldg(arguments.q_begin + sequence) / kSumRows + sequence;
}

/// The last sequence whose first block is not behind `block`.
__device__ __forceinline__ int sequence_of_block(const BackwardArguments& arguments, int block) {
  int low = 0, high = arguments.batch;  // the answer is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_block(arguments, middle) <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The element of lse2 and big_d that belongs to the first row of a block.
__device__ __forceinline__ std::int64_t sum_index(const BackwardArguments& arguments, int head,
                                                  std::int64_t block) {
  return (head * arguments.row_blocks + block) * kSumRows;
}

/// The unit of dq that holds 64 rows and 64 columns of a block.
template <int kDqk>
__device__ __forceinline__ std::int64_t unit_index(const BackwardArguments& arguments, int head,
                                                   std::int64_t block, int row_half, int columns) {
  return ((head * arguments.row_blocks + block) * 2 + row_half) * (kDqk / kUnitColumns) + columns;
}

/// The first element of token `token` (from the first row of its sequence's `range`) of a head.
__device__ __forceinline__ std::int64_t row_index(const Rows& rows, bool ragged, int sequence, int first_row,
                                                  int head, int token) {
  return (ragged ? 0 : sequence * rows.batch) + static_cast<std::int64_t>(first_row + token) * rows.token +
         head * rows.head;
}

}  // namespace basin::attention::sm90
