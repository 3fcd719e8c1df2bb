// What a compiled target offers to the probe: the attention weights of a block of rows, tile by tile, summed as they come.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/kernel.h"

namespace basin::probe::cpu {

inline constexpr int kMaxQueries = 16;  // consecutive queries of one call

/// A block of rows of one kv head, and where their weights A = exp(score - lse_with_sink) are summed. Row r is the query
/// first_position + r / group and head r % group of the kv head. Everything from `position` on is added to.
struct Gather {
  const attention::cpu::Block* block;  // heads = 1; rows = queries * group; its values are not read
  int queries;                         // at most kMaxQueries
  int group;
  std::int64_t first_position;
  const float* denominator;  // [rows] log2 of the denominators, sink included

  /// Key positions, ascending in each query, up to which the weights are also summed on their own.
  const std::int64_t* cuts;  // [queries, cut_count]
  int cut_count;

  double* position;  // [group, key_stride] by key
  double* distance;  // [group, key_stride] by key_stride - 1 - (query position - key position)
  std::int64_t key_stride;
  float* map;  // [group, map_stride] by key / key_bin
  std::int64_t map_stride, key_bin;
  double* mass;              // [rows] sum of A
  double* information;       // [rows] sum of A log2 A
  double* mean_information;  // [queries] the same for the mean over the heads
  double* below_cut;         // [rows, cut_count] sum of A over keys before the cut

  /// Weights of at least `keep`, in the order of keys: of each row, then of the mean of each query's heads. A list may
  /// write kLanes floats beyond its end.
  const float* keep;         // [rows + queries]
  float* const* list;        // [rows + queries]
  std::int64_t* list_count;  // [rows + queries]

  float* mean;  // [queries, mean_stride] by key: mean_factor * sum over heads; may be null
  std::int64_t mean_stride;
  float mean_factor;
};

struct Kernel {
  std::size_t scratch_bytes;  // for groups of up to `group` heads: of scratch(), 64-byte aligned
  /// Goes over the keys in [0, end).
  void (*gather)(const Gather& gather, std::int64_t end, void* scratch);
  /// Converts `rows` query rows into the kernel's format, as attention::cpu::Kernel does.
  void (*pack_queries)(Storage storage, int d, int rows, const std::byte* const* row, void* out);
  /// counts[i] = the smallest number of the largest weights that hold mass[i], and `count` where all together do not.
  /// `mass` ascends. The weights are reordered and kLanes floats behind them overwritten; `scratch` has count + kLanes.
  void (*count_budgets)(float* weights, std::int64_t count, const double* mass, int shares,
                        std::int64_t* counts, float* scratch);
};

/// Most heads of one kv head.
inline constexpr int kMaxGroup = 128;

Kernel kernel(generic::Target);
Kernel kernel(avx2::Target);
Kernel kernel(avx512_bf16::Target);

/// Of this process.
const Kernel& kernel();

}  // namespace basin::probe::cpu
