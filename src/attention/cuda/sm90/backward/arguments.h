// What the kernels of the backward pass are told, beside what forward's are. Checked and filled in by backward.cc.
#pragma once

#include "attention/cuda/sm90/arguments.h"

namespace basin::attention::sm90 {

/// Query rows whose sums are made and stored together. Those of a sequence fill blocks of their own, so that tiles of rows start at
/// the sequence's first and find their sums aligned.
inline constexpr int kSumRows = 128;
/// A partial sum of dq: 64 query rows by 64 columns of one head, as a warpgroup holds them: [8 columns][thread] float4.
inline constexpr int kUnitRows = 64, kUnitColumns = 64, kUnitFloats = kUnitRows * kUnitColumns;

/// A tensor [batch or 1, tokens, heads, columns] that kernels read or write without the copy engine; strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;
};

/// Forward's arguments, of which `out`, both log-sum-exps and the workspace are unused.
struct BackwardArguments : Arguments {
  int d_qk = 0;      // columns that exist; the instance may be wider
  float scale = 0;   // natural units
  Rows forward_out;  // as forward wrote it
  Rows dout;
  const float* forward_lse =
      nullptr;                  // with the sink: [h_q, total_q] or [b, h_q, s_q]; strides lse_batch, lse_head
  const float* dlse = nullptr;  // gradient of forward_lse, in the same layout; may be null
  Rows dq, dk, dv;
  float* dsink_logit = nullptr;  // [h_q]; null without a sink

  // Workspace. Blocks of kSumRows query rows: see first_block.
  std::int64_t row_blocks = 0;
  float* lse2 = nullptr;   // [h_q, row_blocks, kSumRows] in units of log2; +inf where a row has no weights
  float* big_d = nullptr;  // [h_q, row_blocks, kSumRows]
  float* dsink_parts = nullptr;  // [row_blocks, h_q]
  // [h_q, row_blocks, 2, d_qk / 64, kUnitFloats]: the shares of all blocks of keys but the last, which stores dq itself. Null: dq is
  // computed in a pass of its own.
  float* dq_sums = nullptr;
  std::uint32_t* dq_turns = nullptr;  // [h_q, row_blocks, 2, d_qk / 64] shares that are in the sum already
  int dq_units = 0;  // of a block of rows and a head: 2 * d_qk / 64, with d_qk of the instance
  // [batch, h_kv, sink_blocks, 1 + strips, block_keys * (d_qk + d_v)]: see shares_of. Of the rows near a block, then of each strip.
  int sink_blocks = 0, strips = 0;
  float* strip_shares = nullptr;
  std::uint32_t* ticket = nullptr;  // work handed out so far
};

}  // namespace basin::attention::sm90
