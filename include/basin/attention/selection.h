// The vocabulary of sparse attention: keys selected for each query, and what selects them. No algorithm lives here.
//
// Words and maths are those of docs/sinks.md ("Selected keys"). DeepSeek Sparse Attention is both parts; multi-head latent
// attention without an indexer is the first one without indices: many query heads over one key head.
#pragma once

#include <cstdint>
#include <span>

#include "basin/attention/spec.h"

namespace basin::attention {

/// A query sees the keys that were selected for it, of those that the mask shows.
struct Selection {
  /// [total_q, topk] positions of keys in the query's sequence, in any order; -1 = none, anywhere. Null: nothing is selected, and
  /// the mask alone decides. A position outside the sequence, or one that stands in a row twice, is refused.
  const std::int32_t* indices = nullptr;
  std::int64_t topk = 0;  // entries of a row
  const std::int32_t* lengths =
      nullptr;  // [total_q] only the leftmost so many entries of a row count; null = all
};

/// Selects for each query the `topk` keys of the largest index score, of those that the mask shows: of equal scores the smaller
/// position, and all keys while there are at most `topk`.
///   I_j = sum over heads h, ascending, of weight[h] max(q_h . k_j, 0)
struct Indexer {
  Mask mask;
  std::span<const Sequence> sequences;  // [b]
  ConstView q;                          // [total_q, heads, d]
  ConstView
      q_sink;  // same shape, or absent: the second query of in-cache positions, for keys j < mask.sink_tokens
  ConstView k;                     // [total_kv, 1, d], or paged [pages, page_tokens, 1, d]
  const float* weights = nullptr;  // [total_q, heads] of any sign, every scale in it
  std::int64_t topk = 0;           // at least 1
  // Taken whatever their scores, in places of the topk: the first visible keys and the last, self included. Together at most topk.
  std::int64_t forced_first = 0, forced_last = 0;
  std::int32_t* indices =
      nullptr;  // [total_q, topk] ascending, padded with -1; rows outside every sequence are not touched
};

}  // namespace basin::attention
