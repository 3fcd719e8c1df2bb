// How a backward pass is cut into pieces. Pure host functions of upper bounds, tested without a GPU.
#pragma once

#include "attention/cuda/sm90/choose.h"

namespace basin::attention::sm90 {

/// Keys of a CTA that computes dk and dv, and query rows of its tiles, with or without shares of dq (keys_layout.cuh).
constexpr int backward_block_keys(int d_qk) {
  return d_qk <= 128 ? 128 : 64;
}
constexpr int backward_tile_rows(int d_qk, bool sums) {
  return d_qk <= 64 && sums ? 128 : 64;
}
/// Query rows of a CTA that computes dq, and keys of its tiles (queries.cuh): as many as registers hold.
constexpr int backward_block_rows(int d_qk) {
  return d_qk <= 128 ? 64 : 128;
}
constexpr int backward_tile_keys(int d_qk) {
  return d_qk <= 192 ? 64 : 32;
}

/// Rows that see no key of a block but its sink tokens are shared out in strips of this many, from the sequence's first row on, and
/// the strips' shares of dk and dv are added in order: else the first block of keys would have work from every row.
inline constexpr int kStripRows = 2048;

struct BackwardShape : Shape {
  std::int64_t total_q = -1;  // rows of ragged queries; negative when dense
};

/// Where a buffer lies in the workspace.
struct Buffer {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct BackwardPlan {
  int d_qk = 0;  // of the instance; at least the problem's
  int d_v = 0;
  std::int64_t h_q = 0;
  /// dq is summed over blocks of keys by the CTAs of dk and dv; else it is computed in a pass of its own. Depends on the head sizes
  /// and the spec alone, since the two give different bits.
  bool sums = false;
  int block_keys = 0;
  int block_rows = 0;
  int tile_keys = 0;
  std::int64_t row_blocks = 0;  // of kSumRows query rows, over all sequences, at most
  // Of one sequence, at most; 0 without sink tokens beside a window. Shares of a block: that of the rows near it, and the strips'.
  std::int64_t sink_blocks = 0, strips = 0;
  std::int64_t key_ctas = 0;
  std::int64_t query_ctas = 0;
  Buffer ticket, dsink_parts, lse2, big_d, dq_turns, dq_sums, strip_shares;
  std::size_t workspace_bytes = 0;
};

/// The plan for a shape whose head sizes exist; the same on every device.
BackwardPlan backward_plan(const BackwardShape& shape);

}  // namespace basin::attention::sm90
