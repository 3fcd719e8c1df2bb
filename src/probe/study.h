// What the selections of neighbouring queries, of queries far apart and of layers have in common.
//
// S_t: the keys that the query at position t selected; k = topk. Blocks of B consecutive queries; a ragged last block is
// left out. Queries outside the studied range are checked but not studied: as long as t < k, everything is selected.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "basin/base/thread_pool.h"
#include "probe/trace.h"

namespace basin::probe {

inline constexpr std::array<std::int64_t, 7> kBlocks = {2, 4, 8, 16, 32, 64, 128};
inline constexpr std::array<std::int64_t, 4> kSinkCounts = {1, 4, 16, 64};
/// Share of the queries from which a key counts as selected by its absolute position.
inline constexpr double kAbsoluteShare = 0.95;

/// |intersection| and |union| of the blocks of one size.
struct BlockCounts {
  std::int64_t block = 0;
  std::vector<std::int64_t> position;  // of each block's first query
  std::vector<float> intersection, united;
};

struct LayerStudy {
  std::int64_t number = 0;          // the model's layer
  std::vector<BlockCounts> blocks;  // by kBlocks; fewer when there are not enough queries
  std::vector<float>
      multiplicity;  // [128] mean over groups of 128: keys that at least 1, 2, ... 128 of them selected
  std::vector<float> frequency;  // [keys] share of the studied queries at or after the key that selected it
  std::vector<float> age;        // [keys] the same by query position - key
  std::vector<float> map;  // [query bins, key bins] share of the visible keys of the cell that are selected
  std::vector<std::int64_t> lags;
  std::vector<float> overlap;        // [lags] mean |S_t & S_(t + lag)| / k
  std::vector<float> shifted;        // [lags] mean |(S_t + lag) & S_(t + lag)| / k
  std::array<float, 4> sink_kept{};  // mean frequency of the first 1, 4, 16, 64 keys
  /// Mean share of a query's selection that is absolute: selected by 95 % of the queries that see it.
  float absolute_share = 0.0f;
  std::int64_t absolute_keys = 0;
  std::vector<float> absolute_by_query;  // [query bins] that share, against position
  /// Spans of queries: how many keys are absolute in each, and what share of those stays so in the next (the last: NaN).
  std::vector<std::int64_t> span_position;
  std::vector<float> span_keys, span_stay;
  /// Share of the attention over all keys that a selection holds, against position and in the mean; empty and NaN where the
  /// trace does not say.
  std::vector<float> mass_by_query;  // [query bins]
  float mass = std::numeric_limits<float>::quiet_NaN();
  float pairwise_128 = 0.0f;  // mean |S_t & S_u| / k over pairs inside blocks of 128 (sampled)
};

struct Study {
  std::int64_t topk = 0, keys = 0, first = 0,
               queries = 0;  // studied queries: positions [first, first + queries)
  std::int64_t map_rows = 0, map_columns = 0, row_queries = 0, column_keys = 0;
  std::vector<double> rope;  // frequencies of the RoPE null model: the trace's, or else DeepSeek-V3.2's
  bool own_rope = false;
  std::vector<LayerStudy> layers;
  std::vector<float> between;  // [layers, layers] mean |S_t & S'_t| / k over sampled queries
};

struct StudyOptions {
  std::int64_t first = 0;  // position of the first studied query; 0 = topk
  std::int64_t last = 0;   // of the last; 0 = the trace's
  std::int64_t map_bins = 1024;
};

/// Throws Error(corrupt) for the first bad row, Error(invalid_argument) when fewer than 2 queries are left to study,
/// Error(cancelled).
Study study(const Trace& trace, const StudyOptions& options, ThreadPool& pool,
            const std::function<void(std::int64_t done, std::int64_t total)>& on_progress,
            const std::atomic<bool>* cancel);

// --- Null models ---

/// Mean |intersection| and |union| over the blocks of positions [first, first + queries) when every query selects topk of
/// its keys by chance: [blocks] by kBlocks.
struct NullCounts {
  std::vector<double> intersection, united;
};
NullCounts random_counts(std::int64_t first, std::int64_t queries, std::int64_t topk);

/// The angle per token of every rotated pair of DeepSeek-V3.2 (64 dimensions, YaRN x40 from 4096).
std::vector<double> deepseek_frequencies();
/// The content-free RoPE term at a distance: 2 * sum of cos(distance * frequency).
double rope_score(std::int64_t distance, std::span<const double> frequencies);
/// Rows of queries that select the topk distances of the largest rope_score: [queries, topk].
std::vector<std::int32_t> rope_selections(std::int64_t first, std::int64_t queries, std::int64_t topk,
                                          std::span<const double> frequencies);
/// The distances in [2, end) where rope_score has its largest peaks, at most `most`, ascending.
std::vector<std::int64_t> rope_peaks(std::int64_t end, std::size_t most, std::span<const double> frequencies);

}  // namespace basin::probe
