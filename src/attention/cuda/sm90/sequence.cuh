// Where one sequence of the batch lies.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/order.cuh"

namespace basin::attention::sm90 {

struct SequenceRange {
  int q_row;  // first row in q: of its batch entry (dense) or of the whole tensor (ragged)
  int q_tokens;
  int kv_row;  // first row in k and v; 0 when dense or paged
  int kv_tokens;
};

__device__ __forceinline__ int query_tokens(const Arguments& arguments, int sequence) {
  if (arguments.q_begin == nullptr) return arguments.max_q_tokens;
  return __ldg(arguments.q_begin + sequence + 1) - __ldg(arguments.q_begin + sequence);
}

__device__ __forceinline__ int key_tokens(const Arguments& arguments, int sequence) {
  if (arguments.kv_tokens != nullptr) return __ldg(arguments.kv_tokens + sequence);
  if (arguments.kv_begin == nullptr) return arguments.max_kv_tokens;
  return __ldg(arguments.kv_begin + sequence + 1) - __ldg(arguments.kv_begin + sequence);
}

__device__ __forceinline__ SequenceRange sequence_range(const Arguments& arguments, int sequence) {
  SequenceRange range;
  range.q_row = arguments.q_begin == nullptr ? 0 : __ldg(arguments.q_begin + sequence);
  range.q_tokens = query_tokens(arguments, sequence);
  range.kv_row = arguments.kv_begin == nullptr ? 0 : __ldg(arguments.kv_begin + sequence);
  range.kv_tokens = key_tokens(arguments, sequence);
  return range;
}

/// The element of `lse` that belongs to query `token` of a sequence, from `range` and the head.
__device__ __forceinline__ std::int64_t lse_index(const Arguments& arguments, int sequence, int q_row,
                                                  int head, int token) {
  return (arguments.q_begin == nullptr ? sequence * arguments.lse_batch : 0) + head * arguments.lse_head +
         q_row + token;
}

/// The sink logit of a query head; -inf where there is none.
__device__ __forceinline__ float sink_of(const Arguments& arguments, int head) {
  return arguments.sink_logit == nullptr ? negative_infinity() : __ldg(arguments.sink_logit + head);
}

/// Writes those log-sum-exps of a row that the caller wants.
__device__ __forceinline__ void write_lse(const Arguments& arguments, int sequence, int q_row, int head,
                                          int token, const Finish& row) {
  const std::int64_t at = lse_index(arguments, sequence, q_row, head, token);
  if (arguments.lse != nullptr) arguments.lse[at] = row.lse;
  if (arguments.lse_with_sink != nullptr) arguments.lse_with_sink[at] = row.lse_with_sink;
}

/// The first element of the output row of query `token` of a sequence.
__device__ __forceinline__ std::int64_t out_index(const Arguments& arguments, int sequence, int q_row,
                                                  int head, int token) {
  return (arguments.q_begin == nullptr ? sequence * arguments.out_batch : 0) +
         static_cast<std::int64_t>(q_row + token) * arguments.out_token + head * arguments.out_head;
}

}  // namespace basin::attention::sm90
