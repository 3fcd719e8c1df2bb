// What a report shows of a probed model: small numbers, curves and pictures, one layer at a time out of its files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "probe/run.h"

namespace basin::probe {

using Curve = std::vector<std::pair<double, double>>;

inline constexpr std::int64_t kShownKeys = 16;  // first keys whose importance is listed one by one

/// Means over queries; [heads] unless said.
struct LayerSummary {
  std::int64_t window = 0, sink_tokens = 0;  // of its mask
  bool sink_logit = false;
  double largest_row_error = 0.0;
  std::vector<float> entropy, learned_sink;
  std::vector<std::vector<float>> budget;        // [shares][heads]
  std::vector<std::vector<float>> group_budget;  // [shares][kv_heads]
  std::vector<std::vector<float>> sink_mass;     // [n][heads]
  std::vector<std::vector<float>> local_mass;    // [w][heads]
  std::vector<std::vector<float>> importance;  // [key < kShownKeys][heads] mean over the queries that see it
  std::vector<std::vector<float>> early_importance;       // the same over the first kEarlyTokens queries
  std::vector<std::vector<std::vector<float>>> retained;  // [n + 1][w][heads]
  std::vector<Pair> pairs;
  std::vector<float> pair_error;  // [pairs] of all heads together
  Curve distance;                 // mean weight at a distance, over heads and the queries that reach so far
  std::vector<Curve> head_distance;
  Curve position;  // mean weight on a key, over heads and the queries that see it
  std::vector<float> entropy_by_query, budget95_by_query, sink4_by_query;  // [bins] mean over heads
  std::vector<float> map;  // [side, side] share of a query's mass in a key bin, mean over heads
  std::vector<std::vector<float>> head_map;  // [heads][head side, head side]
  std::int64_t side = 0, head_side = 0;
};

struct ModelSummary {
  std::string model, reading;  // reading: "all tokens", "first 4 + last 1020 tokens, ..."
  std::int64_t tokens = 0, context = 0, heads = 0, kv_heads = 0, bin_tokens = 0;
  std::vector<std::int64_t> sink_counts, windows;
  std::vector<LayerSummary> layers;
};

/// Reads the files of a complete run.
ModelSummary summarise(const std::filesystem::path& folder, std::int64_t layers);

/// Copies every layer's arrays into one file, names `layer_000/position` and so on.
void write_data(const std::filesystem::path& folder, std::int64_t layers, const std::filesystem::path& path);

// --- The window advisor ---

struct Choice {
  Pair pair;
  double retained = 0.0;      // mean over layers and heads
  double weakest = 0.0;       // of the layer that keeps least
  double output_error = 0.0;  // mean over layers, NaN when not measured
};

struct Measured {
  std::string name;
  Pair pair;  // window 0 = everything
  double mean_nll = 0.0, perplexity = 0.0;
};

struct Advice {
  double target = 0.0;
  std::vector<Choice> pareto;  // cheapest first; each keeps more than all cheaper ones
  std::vector<std::vector<Pair>>
      of_layer;                // [layers] cheapest pair that reaches the target; empty = none does
  std::vector<Choice> grid;    // every pair
  std::vector<Choice> chosen;  // the cheapest that reaches the target, or empty
  std::vector<Measured> measured;
};

/// Layers with a window of their own are left out: request windows do not act on them.
Advice advise(const ModelSummary& summary, double target);

}  // namespace basin::probe
