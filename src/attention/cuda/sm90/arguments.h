// What a kernel is told. Plain numbers and device pointers; checked and filled in by forward.cc.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace basin::attention::sm90 {

struct Arguments {
  // Shape. Token counts and positions fit in 30 bits (support.cc refuses more).
  int batch = 0;
  int h_q = 0;
  int h_kv = 0;
  int d_v = 0;            // columns of `out` that exist; the instance may be wider
  int max_q_tokens = 0;   // of any sequence
  int max_kv_tokens = 0;  // of any sequence
  int page_shift = 0;     // log2 of page_tokens; 0 when keys are not paged
  int box_shift = 0;      // log2 of the key rows of one copy: min(page_tokens, tile), or the tile

  // Lengths, on the device.
  const std::int32_t* q_begin = nullptr;     // [batch + 1] first row of each sequence; null: dense
  const std::int32_t* kv_begin = nullptr;    // [batch + 1]; null: dense or paged
  const std::int32_t* kv_tokens = nullptr;   // [batch]; null: kv_begin's ranges, or max_kv_tokens
  const std::int32_t* page_table = nullptr;  // [batch, page_table_stride]; null: not paged
  std::int64_t page_table_stride = 0;

  // Mask.
  int causal = 0;
  int window = 0;         // visible recent keys including self; 0 = unlimited
  int window_right = -1;  // -1 = unlimited
  int sink_tokens = 0;

  // Score x (in units of log2) = score_factor * s, or score_factor * tanh(cap_factor * s) with a softcap.
  float score_factor = 0;  // > 0
  float cap_factor = 0;

  int has_q_sink = 0;  // keys below sink_tokens are scored with the second query

  const float* sink_logit = nullptr;  // [h_q] natural units; may be null

  void* out = nullptr;  // [batch or 1, tokens, h_q, d_v] of the storage type
  std::int64_t out_batch = 0, out_token = 0, out_head = 0;  // strides in elements
  bool writes_lse = false;                                  // lse or lse_with_sink is not null
  float* lse = nullptr;                                     // may be null
  float* lse_with_sink = nullptr;                           // may be null
  std::int64_t lse_batch = 0, lse_head = 0;

  std::uint32_t* counters = nullptr;  // zero before the first launch, and left zero
  float4* totals = nullptr;           // prefill of wide heads: [ctas] running totals
  float* states = nullptr;            // decode: [batch, h_kv, max_segments] states
                                      // extend: [batch, max_blocks, h_kv, max_segments]
  int block_tokens = 0;               // extend: query tokens of a block of rows
  int max_blocks = 0;                 // extend: of one sequence
  int max_segments = 0;               // decode, extend: of one row
  int gangs = 0;                      // decode: groups of h_kv CTAs, one for each key head
  int fold_threads = 0;               // decode: that fold one row of saved segments
  int fold_segments = 0;              // decode: that they hold at once
};

}  // namespace basin::attention::sm90
