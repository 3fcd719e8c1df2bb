// What a compiled target offers to the scheduler: plain structs of pointers in, results out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/constants.h"

namespace basin::attention::cpu {

/// Rows of keys or values of one kv head of one sequence.
struct KeyRows {
  const std::byte* base = nullptr;      // row 0 (contiguous), or row 0 of page 0
  std::int64_t row_bytes = 0;           // from one key to the next (inside a page)
  std::int64_t page_bytes = 0;          // from one page to the next; unused when contiguous
  std::int64_t page_tokens = 0;         // 0 = contiguous
  const std::int32_t* pages = nullptr;  // [ceil(kv_tokens / page_tokens)]; null when contiguous
};

/// The keys a row sees: [0, a_end) and [b_begin, b_end). They may overlap; empty when end <= begin.
struct Visible {
  std::int64_t a_end;
  std::int64_t b_begin;
  std::int64_t b_end;
};

/// Running state of rows (of all heads of a block) over one segment; in a total, l has folded sums in lane 0.
struct State {
  float* m;    // [heads * rows] base 2
  float* l;    // [heads * rows, kLanes]
  float* acc;  // [heads * rows, d_v]
};

/// A block of rows, the same queries for each of some kv heads, and the arithmetic.
struct Block {
  Storage storage;
  int d_qk, d_v;                            // multiples of 16, at most kMaxHead
  int heads;                                // kv heads; 1 when rows > kFewRows
  int rows;                                 // of each kv head
  const void* q;                            // [heads * rows, d_qk] as pack_queries left it
  const void* q_sink;                       // same, for keys < sink_tokens; null = q for all keys
  std::int64_t sink_tokens;                 // used with q_sink only
  const Visible* visible;                   // [rows]
  KeyRows k, v;                             // of the first kv head
  std::int64_t k_head_bytes, v_head_bytes;  // from one kv head to the next
  float score_scale;                        // scale * log2(e); with softcap: scale / softcap
  float softcap;                            // softcap * log2(e), 0 = off
};

struct Kernel {
  /// Bytes of scratch that `segment` needs, for any block. 64-byte aligned.
  std::size_t scratch_bytes;

  /// Converts `rows` query rows into the kernel's format: out[rows, d] of 4 bytes an element at most.
  void (*pack_queries)(Storage storage, int d, int rows, const std::byte* const* row, void* out);

  /// Sets the state of `rows` rows to "no keys".
  void (*clear)(int rows, int d_v, const State& state);

  /// Adds the visible keys in [begin, end) to `state`; begin is a multiple of kSegmentKeys, end <= begin + kSegmentKeys.
  /// Then folds the kLanes sums of l into lane 0. `next`: the begin of the segment whose first keys are worth fetching
  /// into the cache meanwhile, -1 = none; it does not touch results.
  void (*segment)(const Block& block, std::int64_t begin, std::int64_t end, std::int64_t next,
                  const State& state, void* scratch);

  /// Merges a segment's state into the running total of the rows.
  void (*fold)(int rows, int d_v, const State& segment, const State& total);
};

Kernel kernel(generic::Target);
Kernel kernel(avx2::Target);
Kernel kernel(avx512_bf16::Target);

}  // namespace basin::attention::cpu
