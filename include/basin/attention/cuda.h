// Attention on Hopper GPUs (sm_90a): bf16 and f16 storage, fp32 accumulation.
//
// Promise: a row of the output depends, bit for bit, on its own visible keys only. Prefill in any chunking, decode with any
// number of CTAs, any page size and any batch give the same bits (src/attention/cuda/sm90/order.cuh has the order).
//
// The launch path allocates nothing, synchronises nothing and reads nothing back, so it can be captured in a CUDA graph and
// replayed with changed lengths in the same buffers. It works on the device that is current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "basin/attention/spec.h"
#include "basin/tensor/view.h"

struct CUstream_st;  // what cudaStream_t points at

namespace basin::attention::cuda {

/// A forward pass over device memory. Queries are dense ([b, s_q, h_q, d]) or ragged ([total_q, h_q, d] with q_begin). Keys are
/// dense ([b, s_kv, h_kv, d]), ragged ([total_kv, h_kv, d] with kv_begin) or paged ([pages, page_tokens, h_kv, d] with
/// page_table). Everything that may change between graph replays lives on the device; the host gives upper bounds.
struct Forward {
  Spec spec;
  std::int64_t batch = 0;          // b, at least 1
  std::int64_t max_q_tokens = 0;   // upper bound of any sequence's queries; s_q when dense
  std::int64_t max_kv_tokens = 0;  // upper bound of any sequence's keys; s_kv when dense

  ConstView q;       // [b, s_q, h_q, d_qk] or [total_q, h_q, d_qk]
  ConstView q_sink;  // same shape, or absent: the second query of in-cache positions
  ConstView k;       // [b, s_kv, h_kv, d_qk], [total_kv, h_kv, d_qk] or [pages, page_tokens, h_kv, d_qk]
  ConstView v;       // as k, with d_v
  const std::int32_t* q_begin =
      nullptr;  // device [b + 1]: rows of sequence i are q_begin[i] .. q_begin[i + 1]; null: dense
  const std::int32_t* kv_begin = nullptr;   // device [b + 1]; null: dense or paged
  const std::int32_t* kv_tokens = nullptr;  // device [b] valid keys; may be null unless paged
  const std::int32_t* page_table =
      nullptr;                         // device [b, page_table_stride]; a negative entry holds no visible key
  std::int64_t page_table_stride = 0;  // entries from one sequence's pages to the next's

  const float* sink_logit = nullptr;  // device [h_q] natural units; null = no sink
  View out;                           // as q, with d_v
  float* lse = nullptr;               // device [h_q, total_q], or [b, h_q, s_q] when dense; may be null
  float* lse_with_sink = nullptr;     // the same; may be null
};

/// Empty when this backend can run the problem, else one sentence: what was asked for and what exists. Looks at host data only.
/// Throws Error(invalid_argument), naming the field and the values, when the problem contradicts itself; so do the others.
std::string supported(const Forward& problem);

/// Device memory that `forward` needs beside its tensors. Depends on shapes and upper bounds only.
std::size_t workspace_bytes(const Forward& problem);

/// Launches on `stream`. `workspace` (16-byte aligned) must hold workspace_bytes and be zero before its first use; every launch
/// leaves it ready for the next, also of another problem. Launches that may run at the same time need a workspace each.
/// Throws Error(unsupported) with the text of `supported`, Error(invalid_argument) for a workspace that is too small, and
/// Error(internal) for what CUDA reports; nothing has been launched then. CUDA loads a kernel when it is first launched on a
/// device: do that once before a capture.
void forward(const Forward& problem, void* workspace, std::size_t bytes, CUstream_st* stream);

/// A backward pass: gradients of sum(out * dout) + sum(lse_with_sink * dlse_with_sink). Deterministic: equal calls give equal bits,
/// and dq, dk and dv of a sequence have the same bits alone and in any batch.
struct Backward {
  /// What forward was given, with contiguous keys (dense or ragged) and without q_sink. `out` and `lse_with_sink` hold what it wrote;
  /// `lse` is not looked at.
  Forward forward;
  ConstView dout;                         // as forward.out
  const float* dlse_with_sink = nullptr;  // device, as forward.lse_with_sink; may be null

  View dq;                       // as q; rows outside every sequence are not touched
  View dk;                       // as k; nor are keys
  View dv;                       // as v
  float* dsink_logit = nullptr;  // device [h_q]; null exactly when sink_logit is
};

/// As for Forward. The workspace need not be zero, and nothing of it is kept.
std::string supported(const Backward& problem);
std::size_t workspace_bytes(const Backward& problem);
void backward(const Backward& problem, void* workspace, std::size_t bytes, CUstream_st* stream);

/// New keys and values on their way into a paged cache, ahead of `forward` on the same stream. Sequence i has kv_tokens[i] keys
/// with its new ones, which are the last: positions kv_tokens[i] - new tokens to kv_tokens[i]. So `forward` takes the same
/// kv_tokens and page_table, and the same q_begin where every new token has a query.
struct Append {
  std::int64_t batch = 0;  // b, at least 1
  ConstView new_k;         // [b, s_new, h_kv, d_qk], or [total_new, h_kv, d_qk] with new_begin
  ConstView new_v;         // as new_k, with d_v
  const std::int32_t* new_begin = nullptr;  // device [b + 1]: the new rows of sequence i; null: dense

  View k;                                    // [pages, page_tokens, h_kv, d_qk], any page_tokens
  View v;                                    // as k, with d_v
  const std::int32_t* kv_tokens = nullptr;   // device [b]
  const std::int32_t* page_table = nullptr;  // device [b, page_table_stride]
  std::int64_t page_table_stride = 0;        // entries from one sequence's pages to the next's
};

/// As for Forward.
std::string supported(const Append& append);

/// Launches on `stream`; nothing is allocated, waited for or read back. Written are the new tokens and nothing else: one whose
/// position is negative or behind its sequence's part of the page table, or whose entry is no page, is left out. Two sequences
/// must not append to one page slot. Throws as `forward` does.
void append(const Append& append, CUstream_st* stream);

}  // namespace basin::attention::cuda
