#include "probe/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "basin/base/error.h"
#include "probe/layer_arrays.h"
#include "probe/npz.h"

namespace basin::probe {
namespace {

constexpr std::int64_t kSide = 256;             // of a layer's map in the page
constexpr std::int64_t kPageBytes = 4'500'000;  // of all heads' maps before packing
constexpr int kPointsPerOctave = 6;

// Means of consecutive entries, every one at first and in steps of a constant ratio later. `value(i)` is NaN where there
// is none.
template <typename Value>
Curve log_curve(std::int64_t count, std::int64_t offset, const Value& value) {
  Curve curve;
  for (std::int64_t begin = 0; begin < count;) {
    const double x = static_cast<double>(begin + offset);
    const auto step = std::max<std::int64_t>(1, std::llround(x * (std::exp2(1.0 / kPointsPerOctave) - 1.0)));
    const std::int64_t end = std::min(begin + step, count);
    double sum = 0.0;
    for (std::int64_t i = begin; i < end; ++i) sum += value(i);
    curve.emplace_back((static_cast<double>(begin + end - 1)) / 2.0 + static_cast<double>(offset),
                       sum / static_cast<double>(end - begin));
    begin = end;
  }
  return curve;
}

std::vector<float> mean_of_bins(const std::vector<float>& values, std::int64_t first, std::int64_t heads,
                                const LayerProfile& p) {
  std::vector<float> means;
  for (std::int64_t h = 0; h < heads; ++h) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < p.bins; ++i) {
      const std::int64_t queries = std::min(p.bin_tokens, p.tokens - i * p.bin_tokens);
      sum += static_cast<double>(values[static_cast<std::size_t>((first + h) * p.bins + i)]) *
             static_cast<double>(queries);
    }
    means.push_back(static_cast<float>(sum / static_cast<double>(p.tokens)));
  }
  return means;
}

std::vector<float> mean_over_heads(const std::vector<float>& values, std::int64_t first,
                                   const LayerProfile& p) {
  std::vector<float> means(static_cast<std::size_t>(p.bins), 0.0f);
  for (std::int64_t h = 0; h < p.heads; ++h) {
    for (std::int64_t i = 0; i < p.bins; ++i) {
      means[static_cast<std::size_t>(i)] +=
          values[static_cast<std::size_t>((first + h) * p.bins + i)] / static_cast<float>(p.heads);
    }
  }
  return means;
}

std::vector<std::vector<float>> split(const std::vector<float>& values, std::int64_t first, std::int64_t rows,
                                      std::int64_t columns) {
  std::vector<std::vector<float>> out;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto* from = values.data() + (first + i) * columns;
    out.emplace_back(from, from + columns);
  }
  return out;
}

// Every `merged` bins of a square map as one: shares of keys are added, those of queries averaged.
std::vector<float> merge_bins(const float* map, std::int64_t bins, std::int64_t merged) {
  const std::int64_t side = (bins + merged - 1) / merged;
  std::vector<float> out(static_cast<std::size_t>(side * side), 0.0f);
  for (std::int64_t i = 0; i < bins; ++i) {
    const std::int64_t row = i / merged;
    const auto rows = static_cast<float>(std::min(merged, bins - row * merged));
    float* to = out.data() + row * side;
    for (std::int64_t j = 0; j < bins; ++j) to[j / merged] += map[i * bins + j] / rows;
  }
  return out;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

LayerSummary summarise(const LayerResult& r, std::int64_t head_side) {
  const LayerProfile& p = r.profile;
  LayerSummary s;
  s.window = p.window;
  s.sink_tokens = p.sink_tokens;
  s.sink_logit = p.sink_logit;
  s.largest_row_error = p.largest_row_error;
  const auto n_count = static_cast<std::int64_t>(p.sink_counts.size());
  const auto w_count = static_cast<std::int64_t>(p.windows.size());
  s.entropy = mean_of_bins(p.entropy, 0, p.heads, p);
  s.learned_sink = mean_of_bins(p.learned_sink, 0, p.heads, p);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(kBudgetShares.size()); ++i) {
    s.budget.push_back(mean_of_bins(p.budget, i * p.heads, p.heads, p));
    s.group_budget.push_back(mean_of_bins(p.group_budget, i * p.kv_heads, p.kv_heads, p));
  }
  s.sink_mass = split(p.sink_mass, 0, n_count, p.heads);
  s.local_mass = split(p.local_mass, 0, w_count, p.heads);
  for (std::int64_t n = 0; n <= n_count; ++n)
    s.retained.push_back(split(p.retained, n * w_count, w_count, p.heads));
  for (std::int64_t key = 0; key < std::min(kShownKeys, p.tokens); ++key) {
    std::vector<float> all, early;
    for (std::int64_t h = 0; h < p.heads; ++h) {
      all.push_back(p.position[static_cast<std::size_t>(h * p.tokens + key)] /
                    static_cast<float>(p.tokens - key));
      early.push_back(p.early[static_cast<std::size_t>(h * kEarlyTokens + key)] /
                      static_cast<float>(std::min(kEarlyTokens, p.tokens) - key));
    }
    s.importance.push_back(std::move(all));
    s.early_importance.push_back(std::move(early));
  }
  s.pairs = r.pairs;
  s.pair_error = r.pair_error_all;
  // A key at position k, or a distance of a, is seen by tokens - k queries (with a window: by fewer; the sum stays right
  // for comparing layers of one kind).
  const auto mean = [&](const std::vector<float>& sums, std::int64_t first, std::int64_t last,
                        std::int64_t i) {
    double sum = 0.0;
    for (std::int64_t h = first; h < last; ++h)
      sum += static_cast<double>(sums[static_cast<std::size_t>(h * p.tokens + i)]);
    return sum / static_cast<double>(last - first) / static_cast<double>(p.tokens - i);
  };
  // Far ends are seen by few queries: noise.
  const std::int64_t shown = std::max<std::int64_t>(1, p.tokens - std::min<std::int64_t>(p.tokens / 8, 64));
  s.distance = log_curve(shown, 1, [&](std::int64_t i) { return mean(p.distance, 0, p.heads, i); });
  for (std::int64_t h = 0; h < p.heads; ++h) {
    s.head_distance.push_back(
        log_curve(shown, 1, [&](std::int64_t i) { return mean(p.distance, h, h + 1, i); }));
  }
  s.position = log_curve(shown, 1, [&](std::int64_t i) { return mean(p.position, 0, p.heads, i); });
  s.entropy_by_query = mean_over_heads(p.entropy, 0, p);
  s.budget95_by_query = mean_over_heads(p.budget, p.heads, p);
  const std::int64_t n4 = std::min<std::int64_t>(1, n_count - 1);
  if (n4 >= 0) s.sink4_by_query = mean_over_heads(p.sink_by_query, n4 * p.heads, p);

  const std::int64_t merged = divide_up(p.bins, kSide), head_merged = divide_up(p.head_bins, head_side);
  s.side = divide_up(p.bins, merged);
  s.map = merge_bins(p.map.data(), p.bins, merged);
  s.head_side = divide_up(p.head_bins, head_merged);
  for (std::int64_t h = 0; h < p.heads; ++h) {
    s.head_map.push_back(
        merge_bins(p.head_map.data() + h * p.head_bins * p.head_bins, p.head_bins, head_merged));
  }
  return s;
}

}  // namespace

ModelSummary summarise(const std::filesystem::path& folder, std::int64_t layers) {
  ModelSummary summary;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const LayerResult result = read_layer(layer_file(folder, layer));
    const LayerProfile& p = result.profile;
    if (layer == 0) {
      summary.tokens = p.tokens;
      summary.heads = p.heads;
      summary.kv_heads = p.kv_heads;
      summary.bin_tokens = p.bin_tokens;
      summary.sink_counts = p.sink_counts;
      summary.windows = p.windows;
    }
    const auto head_side = static_cast<std::int64_t>(
        std::sqrt(static_cast<double>(kPageBytes) / static_cast<double>(layers * p.heads)));
    summary.layers.push_back(summarise(result, std::clamp<std::int64_t>(head_side, 24, kHeadBins)));
  }
  return summary;
}

void write_data(const std::filesystem::path& folder, std::int64_t layers, const std::filesystem::path& path) {
  NpzWriter out(path);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const NpzFile file(layer_file(folder, layer));
    const std::string prefix = fmt::format("layer_{:03}/", layer);
    for (const std::string& name : file.names()) {
      if (name != "topk") out.copy(prefix + name, file, name);
    }
  }
  out.finish();
}

Advice advise(const ModelSummary& summary, double target) {
  Advice advice;
  advice.target = target;
  advice.of_layer.resize(summary.layers.size());
  std::vector<const LayerSummary*> full;
  for (const LayerSummary& layer : summary.layers) {
    if (layer.window == 0) full.push_back(&layer);
  }
  if (full.empty()) return advice;
  const auto mean = [](const std::vector<float>& values) {
    double sum = 0.0;
    for (const float v : values) sum += static_cast<double>(v);
    return sum / static_cast<double>(values.size());
  };
  const auto cheaper = [](const Pair& a, const Pair& b) {
    const std::int64_t cost_a = a.sink_tokens + a.window, cost_b = b.sink_tokens + b.window;
    return cost_a != cost_b ? cost_a < cost_b : a.sink_tokens < b.sink_tokens;
  };
  for (std::size_t n = 0; n <= summary.sink_counts.size(); ++n) {
    for (std::size_t w = 0; w < summary.windows.size(); ++w) {
      const Pair pair{n == 0 ? 0 : summary.sink_counts[n - 1], summary.windows[w]};
      if (pair.sink_tokens + pair.window >= summary.tokens) continue;
      Choice choice{pair, 0.0, 1.0, 0.0};
      std::int64_t measured = 0;
      for (std::size_t l = 0; l < summary.layers.size(); ++l) {
        const LayerSummary& layer = summary.layers[l];
        if (layer.window > 0) continue;
        const double kept = mean(layer.retained[n][w]);
        choice.retained += kept / static_cast<double>(full.size());
        choice.weakest = std::min(choice.weakest, kept);
        std::vector<Pair>& best = advice.of_layer[l];
        if (kept >= target && (best.empty() || cheaper(pair, best[0]))) best = {pair};
        for (std::size_t i = 0; i < layer.pairs.size(); ++i) {
          if (layer.pairs[i].sink_tokens != pair.sink_tokens || layer.pairs[i].window != pair.window)
            continue;
          choice.output_error += static_cast<double>(layer.pair_error[i]);
          ++measured;
        }
      }
      choice.output_error = measured > 0 ? choice.output_error / static_cast<double>(measured)
                                         : std::numeric_limits<double>::quiet_NaN();
      advice.grid.push_back(choice);
    }
  }
  std::sort(advice.grid.begin(), advice.grid.end(),
            [&](const Choice& a, const Choice& b) { return cheaper(a.pair, b.pair); });
  double best = 0.0;
  for (const Choice& choice : advice.grid) {
    if (choice.retained <= best) continue;
    best = choice.retained;
    advice.pareto.push_back(choice);
    if (advice.chosen.empty() && choice.retained >= target) advice.chosen.push_back(choice);
  }
  return advice;
}

}  // namespace basin::probe
