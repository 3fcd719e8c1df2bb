// The numbers that figures, page and words of a study's report share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "probe/report_parts.h"

namespace basin::probe {

constexpr std::size_t kPoints = 220;  // of a curve

inline double quantile(std::vector<float> values, double share) {
  if (values.empty()) return std::nan("");
  const auto at = static_cast<std::ptrdiff_t>(std::llround(share * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return static_cast<double>(values[static_cast<std::size_t>(at)]);
}

// At most kPoints points: means, or the largest values so that single peaks stay.
inline Curve thin(const std::vector<double>& x, const std::vector<float>& y, bool largest,
                  std::size_t most = kPoints) {
  Curve curve;
  const std::size_t steps = std::min(most, y.size());
  for (std::size_t k = 0; k < steps; ++k) {
    const std::size_t begin = k * y.size() / steps, end = std::max(begin + 1, (k + 1) * y.size() / steps);
    double sum = 0.0, top = 0.0, at = 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      sum += static_cast<double>(y[i]);
      top = std::max(top, static_cast<double>(y[i]));
      at += x[i];
    }
    const auto count = static_cast<double>(end - begin);
    curve.emplace_back(at / count, largest ? top : sum / count);
  }
  return curve;
}

template <typename T>
std::vector<double> doubles(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

inline std::vector<double> count_up(std::size_t count, double first = 0.0) {
  std::vector<double> x(count);
  std::iota(x.begin(), x.end(), first);
  return x;
}

/// Fewer cells, each the largest of those below it: a line of one pixel stays one.
inline std::vector<float> shrink(const std::vector<float>& map, std::int64_t rows, std::int64_t columns,
                                 std::int64_t to_rows, std::int64_t to_columns) {
  std::vector<float> out(static_cast<std::size_t>(to_rows * to_columns), 0.0f);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      float& cell = out[static_cast<std::size_t>(i * to_rows / rows * to_columns + j * to_columns / columns)];
      cell = std::max(cell, map[static_cast<std::size_t>(i * columns + j)]);
    }
  }
  return out;
}

class TraceView {
 public:
  TraceView(const Study& study, const Nulls& nulls, const std::string& source)
      : s_(study), nulls_(nulls), source_(source) {}

 protected:
  std::string rope_owner() const { return s_.own_rope ? "the model's" : "DeepSeek-V3.2's"; }
  bool has_mass() const {
    return std::all_of(s_.layers.begin(), s_.layers.end(),
                       [](const LayerStudy& l) { return !l.mass_by_query.empty(); });
  }
  // Mean over all layers but the first, point by point.
  template <typename Values>
  std::vector<float> rest(const Values& values) const {
    const std::size_t begin = s_.layers.size() > 1 ? 1 : 0;
    std::vector<float> sum = values(s_.layers[begin]);
    for (std::size_t i = begin + 1; i < s_.layers.size(); ++i) {
      const std::vector<float>& more = values(s_.layers[i]);
      for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += more[k];
    }
    for (float& v : sum) v /= static_cast<float>(s_.layers.size() - begin);
    return sum;
  }
  std::string rest_name() const {
    return s_.layers.size() > 1 ? "other layers, mean" : fmt::format("layer {}", s_.layers[0].number);
  }
  std::string first_name() const { return fmt::format("layer {}", s_.layers[0].number); }
  bool several() const { return s_.layers.size() > 1; }
  std::pair<double, double> rest_block() const {
    return {mean(rest([](const LayerStudy& l) { return l.blocks.back().intersection; })),
            mean(rest([](const LayerStudy& l) { return l.blocks.back().united; }))};
  }
  // The map with queries from left to right, as the study's pictures have it.
  std::vector<float> turned(const LayerStudy& l, std::int64_t height, std::int64_t width) const {
    const std::vector<float> small = shrink(l.map, s_.map_rows, s_.map_columns, width, height);
    std::vector<float> out(small.size());
    for (std::int64_t q = 0; q < width; ++q) {
      for (std::int64_t k = 0; k < height; ++k) {
        out[static_cast<std::size_t>(k * width + q)] = small[static_cast<std::size_t>(q * height + k)];
      }
    }
    return out;
  }
  std::vector<double> query_positions() const {
    std::vector<double> x;
    for (std::int64_t row = 0; row < s_.map_rows; ++row) {
      x.push_back(static_cast<double>(s_.first + row * s_.row_queries) +
                  static_cast<double>(s_.row_queries) / 2.0);
    }
    return x;
  }
  template <typename Value>
  double over_layers(const Value& value) const {
    double sum = 0.0;
    for (const LayerStudy& l : s_.layers) sum += static_cast<double>(value(l));
    return sum / static_cast<double>(s_.layers.size());
  }

  const Study& s_;
  const Nulls& nulls_;
  const std::string& source_;
};

/// The parts of the report, one file each.
std::vector<Figure> trace_figures(const Study& study, const Nulls& nulls, const std::string& source);
Json trace_page(const Study& study, const Nulls& nulls, const std::string& source,
                const std::vector<std::string>& lines);

}  // namespace basin::probe
