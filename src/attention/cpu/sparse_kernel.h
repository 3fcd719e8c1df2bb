// What a compiled target offers to sparse attention: the heads of one query over any set of keys, and index scores.
//
// The order of operations is that of constants.h, tile by tile and segment by segment of absolute positions, with the keys that a
// query does not see left out. So a set of keys gives the bits of the dense path under a mask that shows exactly these.
#pragma once

#include "attention/cpu/kernel.h"

namespace basin::attention::cpu {

inline constexpr int kMaxSparseHead = 576;  // largest d_qk or d_v: a latent of 512 and 64 rotated dimensions
inline constexpr int kSparseRows = 64;      // heads that share one pass over the keys; does not touch results

/// Heads of one query that read one kv head, at most kSparseRows.
struct SparseRows {
  Storage storage;
  int d_qk, d_v;
  int rows;
  const void* q;              // as pack_heads left it
  const void* q_sink;         // same, for keys < sink_tokens; null = q for all keys
  std::int64_t sink_tokens;   // used with q_sink only
  const std::uint64_t* seen;  // [words] bit i of word w = key kTileKeys * w + i
  std::int64_t words;
  KeyRows k, v;
  float score_scale, softcap;  // as in Block
};

/// Queries against the keys of one tile, for index scores.
struct IndexTile {
  Storage storage;
  int d, heads, queries;
  const void* q;         // [queries * heads, d] as Kernel::pack_queries left it
  const float* weights;  // [queries, heads]
  KeyRows k;
  std::int64_t begin;    // of the tile
  std::uint64_t wanted;  // bit i = key begin + i is there; not empty
  float* scores;         // [queries, row_floats], of the tile's first key; whole tiles are written
  std::int64_t row_floats;
};

struct SparseKernel {
  std::size_t scratch_bytes;        // of `run`, 64-byte aligned
  std::size_t index_scratch_bytes;  // of `index`

  /// Heads in lanes, out[ceil(rows / kLanes), steps, kLanes]; few heads in rows, out[rows, steps].
  void (*pack_heads)(Storage storage, int d, int rows, const std::byte* const* row, void* out);

  /// The state over all seen keys, folded: m and l [kSparseRows] (base 2), acc [rows, d_v].
  void (*run)(const SparseRows& rows, float* m, float* l, float* acc, void* scratch);

  void (*index)(const IndexTile& tile, void* scratch);
};

SparseKernel sparse_kernel(generic::Target);
SparseKernel sparse_kernel(avx2::Target);
SparseKernel sparse_kernel(avx512_bf16::Target);

}  // namespace basin::attention::cpu
