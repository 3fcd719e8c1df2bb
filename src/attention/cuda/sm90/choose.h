// Which kernel runs a problem, with what launch shape. Pure host functions of upper bounds, tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "basin/base/dtype.h"

namespace basin::attention::sm90 {

struct Shape {
  DType dtype = DType::bf16;
  std::int64_t batch = 0;
  std::int64_t h_q = 0;
  std::int64_t h_kv = 0;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  std::int64_t max_q_tokens = 0;
  std::int64_t max_kv_tokens = 0;
  bool softcap = false;
  bool second_query = false;  // in-cache positions
  std::int64_t window = 0;    // recent keys that a row sees; 0: all
  std::int64_t sink_tokens = 0;
};

/// Head sizes that are compiled, and what they were compiled for.
struct HeadSizes {
  int d_qk;
  int d_v;
  int tile_keys;
  int segment_keys;
  int prefill_rows;
  int decode_rows;  // the most that one decode CTA holds
  // Of a prefill CTA's running totals in the workspace; 0: shared memory holds them.
  int total_bytes;
};

/// All of them, ascending: one row for each size under instances/. A problem runs on the first that holds both of its own; the
/// copy engine fills the rest with zeros. choose_check.cu holds the numbers to those of the kernels.
inline constexpr HeadSizes kHeadSizes[] = {
    // d_qk, d_v, tile_keys, segment_keys, prefill_rows, decode_rows, total_bytes
    {64, 64, 128, 1024, 192, 64, 0},
    {128, 128, 128, 1024, 128, 32, 0},
    {192, 128, 128, 2048, 128, 32, 65536},
    {256, 256, 64, 2048, 128, 32, 131072},
};

/// Null when none holds (d_qk, d_v).
const HeadSizes* find_head_sizes(std::int64_t d_qk, std::int64_t d_v);

/// Query rows that one decode CTA may hold (query tokens times query heads of a group), up to decode_rows of the head size.
inline constexpr int kDecodeRows[] = {8, 16, 32, 64};
/// Decode kernels up to this many rows also hold the second query of in-cache positions.
inline constexpr int kMaxSecondQueryRows = 16;
/// Query rows of an extend CTA: query heads of a group times some tokens.
inline constexpr int kExtendRows = 64;
/// Floats of a state that extend saves: accumulators, then (m, l) of every row, aligned to 16 bytes.
constexpr std::int64_t state_floats(std::int64_t rows, std::int64_t d_v) {
  return (rows * (d_v + 2) + 3) / 4 * 4;
}

/// Of the largest sm_90 chip: the workspace does not depend on the device.
inline constexpr int kMaxMultiprocessors = 144;

/// Whether the registers of a decode CTA hold the running totals of its rows beside a segment. Otherwise all segments are saved.
constexpr bool decode_folds(int rows, int d_v) {
  return rows <= 32 && rows * d_v <= 4096;
}
/// As many CTAs as registers and shared memory of a multiprocessor hold.
constexpr int decode_ctas_per_multiprocessor(int rows, int d_qk, bool alone) {
  return rows * d_qk <= 1024 && !alone ? 2 : 1;
}

/// Rows of few segments are folded by a warp, others by a CTA of kFoldThreads.
inline constexpr int kFoldThreads = 128;
inline constexpr int kWarpFoldSegments = 32;
/// Saved segments that a fold of `threads` threads holds in shared memory at once, and the bytes that they take there.
constexpr int fold_segments(int d_v, int threads, std::int64_t max_segments) {
  const int most = 64 * threads / d_v;
  return max_segments < most ? static_cast<int>(max_segments) : most;
}
inline constexpr int kFoldMemory = 200 * 1024;  // of a multiprocessor
constexpr int fold_bytes(int d_v, int at_once) {
  return at_once * (d_v * 4 + 16) + 16;
}

/// Counters at the start of the workspace: some for all CTAs, then for each block of rows of extend its saved segments and a
/// place in the queue of blocks to fold (fold_queue.cuh). Decode uses none.
inline constexpr std::int64_t kTicketCounters = 4;
inline constexpr std::int64_t kMaxBlocks = 65534;
inline constexpr std::int64_t kCounters = kTicketCounters + 2 * kMaxBlocks;

enum class Path { prefill, decode, extend };

struct Plan {
  Path path = Path::prefill;
  int d_qk = 0;  // of the instance; at least the problem's
  int d_v = 0;
  int tile_keys = 0;
  int rows = 0;                // query rows of a CTA
  std::int64_t units = 0;      // pieces of work, at most
  int ctas = 0;                // grid
  bool alone = false;          // decode: a CTA may take all memory of its multiprocessor
  int gangs = 0;               // decode: groups of h_kv CTAs, one for each key head
  int fold_threads = 0;        // decode: that fold one row of saved segments
  int fold_segments = 0;       // decode: that they hold at once
  std::int64_t fold_ctas = 0;  // decode: grid of the fold; 0: nothing is saved
  int fold_bytes = 0;          // decode: shared memory of its CTAs
  std::int64_t segments =
      0;  // decode, extend: of one row, at most; those that a mask hides do not count in decode
  int block_tokens = 0;             // extend: query tokens of a block of rows
  std::int64_t blocks = 1;          // extend: of one sequence, at most
  std::size_t counter_bytes = 0;    // the part of the workspace that starts as zero
  std::size_t workspace_bytes = 0;  // does not depend on the device
};

/// The plan for a shape whose head sizes exist, on a device with `multiprocessors` SMs.
Plan plan(const Shape& shape, int multiprocessors);

}  // namespace basin::attention::sm90
