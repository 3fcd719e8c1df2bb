// Where the attention of one layer goes: the second pass, which recomputes the weights and sums them, never S x S.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "basin/attention/spec.h"
#include "basin/base/thread_pool.h"

namespace basin::probe {

/// Shares of a row's mass for which the effective budget is counted.
inline constexpr std::array<double, 3> kBudgetShares = {0.90, 0.95, 0.99};
/// Queries of the published sink rate (arXiv 2410.10781), and its threshold.
inline constexpr std::int64_t kEarlyTokens = 64;
inline constexpr double kSinkThreshold = 0.3;
/// Most rows and columns of the map of a single head.
inline constexpr std::int64_t kHeadBins = 128;

struct LayerOptions {
  std::int64_t map_bins = 512;  // >= 1, most rows and columns of a map
  std::int64_t topk = 0;        // keys of the recorded sets, 0 = record none
};

/// What was found in one layer. A is the weight after the softmax, whose denominator includes a learned sink. Means are
/// over queries. All arrays are row-major.
struct LayerProfile {
  std::int64_t tokens = 0, heads = 0, kv_heads = 0;
  std::int64_t window = 0, sink_tokens = 0;  // of the layer's mask
  bool sink_logit = false;
  std::int64_t bin_tokens = 1, bins = 0;  // bin i of queries or keys holds tokens [i, i + 1) * bin_tokens
  std::int64_t head_bins =
      0;  // of the maps of single heads: at most kHeadBins, of as many bins each as need be

  std::vector<std::int64_t> sink_counts;  // [n]
  std::vector<std::int64_t> windows;      // [w]

  std::vector<float> position;       // [heads, tokens] sum over queries of A on that key
  std::vector<float> distance;       // [heads, tokens] sum over queries of A at that distance (0 = self)
  std::vector<float> early;          // [heads, kEarlyTokens] `position` of the first kEarlyTokens queries
  std::vector<float> map;            // [bins, bins] share of a query's mass in a bin of keys, mean over heads
  std::vector<float> head_map;       // [heads, head_bins, head_bins] the same of each head, in coarser bins
  std::vector<float> entropy;        // [heads, bins] mean, natural log, the learned sink as one outcome
  std::vector<float> group_entropy;  // [kv_heads, bins] the same for the mean over the heads of a kv head
  std::vector<float>
      budget;  // [shares, heads, bins] mean count of keys that hold the share of the keys' mass
  std::vector<float>
      group_budget;  // [shares, kv_heads, bins] the same for the mean over the heads of a kv head
  std::vector<float> learned_sink;   // [heads, bins] mean mass of the learned sink
  std::vector<float> sink_mass;      // [n, heads] mean mass of the first n keys, over queries that see more
  std::vector<float> sink_by_query;  // [n, heads, bins] mean mass of the first n keys, over all queries
  std::vector<float> local_mass;  // [w, heads] mean mass of the last w keys, self included, over all queries
  /// [n + 1, w, heads] mean share of the keys' mass that the first 0, sink_counts[0], ... keys and the last w hold, over
  /// queries from which this hides something; 1 where there are none.
  std::vector<float> retained;
  double largest_row_error = 0.0;  // of |sum of A + learned sink - 1|

  std::vector<std::int32_t>
      topk;  // [tokens, topk] keys of the largest mean weight over heads, unordered, -1 padded
  std::int64_t topk_width = 0;
  std::vector<float> topk_mass;  // [tokens] share of the keys' mass that they hold, mean over heads
};

/// Sink counts and windows that a text of so many tokens can show.
std::vector<std::int64_t> sink_counts(std::int64_t tokens);
std::vector<std::int64_t> windows(std::int64_t tokens);

/// `problem`: one causal sequence whose queries are all its tokens, with lse and lse_with_sink filled. Throws
/// Error(unsupported | invalid_argument). Threads do not change a bit.
LayerProfile profile(const attention::Forward& problem, const LayerOptions& options, ThreadPool& pool);

/// Smallest numbers of the largest `weights` that hold the shares of `mass`; weights that are not given are smaller than
/// all that are, and hold less than what the largest share leaves. Sums are exact for weights within a factor of 2^28 of
/// `mass`, so that their order does not matter. Reorders the weights and overwrites kLanes floats behind them.
std::array<std::int64_t, 3> budgets(float* weights, std::int64_t count, double mass);

}  // namespace basin::probe
