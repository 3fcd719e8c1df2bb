// What a compiled target offers to the backward pass: some rows of one kv head against a range of keys.
#pragma once

#include "attention/cpu/kernel.h"

namespace basin::attention::cpu {

// Rows (query, head in group) of one sequence whose sums over rows are one chain. It is part of the order of operations:
//   P      = exp2(x - lse2) and dS = P (dP - D) slope scale, in float, with x and dP as the scores of constants.h;
//   dq     = one FMA chain over ascending keys of dS k_j;
//   dk, dv = for every kChunkRows rows from row 0 of the sequence on, one FMA chain over ascending rows (queries, and within
//            a query its heads) of dS q and P dO from zero; then the chunks are added, ascending.
inline constexpr int kChunkRows = 512;
inline constexpr int kPairRows = 64;  // rows whose P and dS are held at once; does not touch results

struct BackwardBlock {
  Block scores;  // q, k, v, rows, visible and the arithmetic; rows at most kChunkRows, one head, no q_sink
  const void* dout;        // [rows, d_v] as pack_rows left it
  const float* q_rows;     // [rows, d_qk]
  const float* dout_rows;  // [rows, d_v]
  const float* lse2;       // [rows] lse_with_sink in base 2; 0 for a row without keys
  const float* big_d;      // [rows] dO . O - dlse_with_sink
  float scale;             // of the scores, natural units
  float* dq;               // [rows, d_qk], added to
  float* dk;               // of the key at `begin` (below): [keys, d_qk], added to; room for whole tiles
  float* dv;               // likewise [keys, d_v]
};

struct BackwardKernel {
  std::size_t scratch_bytes;  // of `run`

  /// Rows of q or dout as products take them (at most 4 bytes an element), and as floats. `packed` may be `floats`: where the
  /// two are the same, both hold them afterwards.
  void (*pack_rows)(Storage storage, int d, int rows, const std::byte* const* row, void* packed,
                    float* floats);

  /// The keys in [begin, end), both multiples of kTileKeys.
  void (*run)(const BackwardBlock& block, std::int64_t begin, std::int64_t end, void* scratch);
};

BackwardKernel backward_kernel(generic::Target);
BackwardKernel backward_kernel(avx2::Target);
BackwardKernel backward_kernel(avx512_bf16::Target);

}  // namespace basin::attention::cpu
