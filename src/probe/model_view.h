// The numbers that figures, page and words of a model's report share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "probe/report_parts.h"

namespace basin::probe {

class ModelView {
 public:
  ModelView(const ModelSummary& summary, const Advice& advice) : s_(summary), advice_(advice) {}

 protected:
  static double average(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }
  template <typename Value>
  std::vector<double> over_layers(const Value& value) const {
    std::vector<double> values;
    for (const LayerSummary& l : s_.layers) values.push_back(value(l));
    return values;
  }
  double average_budget(std::size_t share) const {
    return average(over_layers([&](const LayerSummary& l) { return mean(l.budget[share]); }));
  }
  bool has_learned_sink() const {
    return std::any_of(s_.layers.begin(), s_.layers.end(),
                       [](const LayerSummary& l) { return l.sink_logit; });
  }
  double row_error() const {
    double largest = 0.0;
    for (const LayerSummary& l : s_.layers) {
      if (!(l.largest_row_error <= largest)) largest = l.largest_row_error;
    }
    return largest;
  }
  // Share of all layers and heads whose importance of the key is above the threshold.
  double rate(std::size_t key, bool early) const {
    double above = 0.0, all = 0.0;
    for (const LayerSummary& l : s_.layers) {
      const auto& importance = early ? l.early_importance : l.importance;
      if (key >= importance.size()) return 0.0;
      for (const float value : importance[key]) {
        above += static_cast<double>(value) > kSinkThreshold ? 1.0 : 0.0;
        all += 1.0;
      }
    }
    return above / all;
  }
  std::int64_t sinks(std::size_t n) const { return n == 0 ? 0 : s_.sink_counts[n - 1]; }
  std::string sink_name(std::size_t n) const {
    return n == 0          ? "no sink tokens"
           : sinks(n) == 1 ? "1 sink token"
                           : fmt::format("{} sink tokens", sinks(n));
  }
  std::vector<std::size_t> shown_sinks() const {
    std::vector<std::size_t> all;
    for (std::size_t n = 0; n <= std::min<std::size_t>(s_.sink_counts.size(), 4); ++n) all.push_back(n);
    return all;
  }
  bool hides(std::size_t n, std::size_t w) const { return sinks(n) + s_.windows[w] < s_.tokens; }
  double model_retained(std::size_t n, std::size_t w) const {
    double sum = 0.0, count = 0.0;
    for (const LayerSummary& l : s_.layers) {
      if (l.window > 0) continue;
      sum += mean(l.retained[n][w]);
      count += 1.0;
    }
    return count > 0.0 ? sum / count : std::nan("");
  }
  std::size_t local_index() const {
    for (std::size_t w = 0; w < s_.windows.size(); ++w) {
      if (s_.windows[w] == 256) return w;
    }
    return s_.windows.size() - 1;
  }
  /// What the probe says of a pair; null where it says nothing, as of reading everything.
  const Choice* prediction(const Pair& pair) const {
    const auto same = [&](const Choice& c) {
      return c.pair.sink_tokens == pair.sink_tokens && c.pair.window == pair.window;
    };
    const auto found = std::find_if(advice_.grid.begin(), advice_.grid.end(), same);
    return found == advice_.grid.end() ? nullptr : &*found;
  }
  std::int64_t local_window() const { return s_.windows[local_index()]; }

  const ModelSummary& s_;
  const Advice& advice_;
};

/// The parts of the report, one file each.
std::vector<Figure> model_figures(const ModelSummary& summary, const Advice& advice);
Json model_page(const ModelSummary& summary, const Advice& advice, const std::vector<std::string>& lines,
                const std::vector<std::string>& labels, ThreadPool& pool);

}  // namespace basin::probe
