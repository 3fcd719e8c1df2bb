// The page of a model's report: what report.html is given to show.
#include "probe/model_view.h"

namespace basin::probe {
namespace {

constexpr double kMapLow = -6.0, kMapHigh = 0.0;  // log10 of the share of a query's mass in a key bin
constexpr std::size_t kMostLabels = 40'000;
constexpr const char* kShareNames[] = {"90 %", "95 %", "99 %"};  // kBudgetShares

class ModelPage : ModelView {
 public:
  using ModelView::ModelView;

  Json json(const std::vector<std::string>& lines, const std::vector<std::string>& labels,
            ThreadPool& pool) const {
    Json data;
    data["title"] = fmt::format("Where {} looks", s_.model);
    data["subtitle"] = fmt::format("{} tokens, {}", s_.tokens, s_.reading);
    data["lines"] = lines;
    const std::vector<double> on_first =
        over_layers([](const LayerSummary& l) { return mean(l.importance[0]); });
    data["first_layer"] = std::max_element(on_first.begin(), on_first.end()) - on_first.begin();
    Json names = Json::array();
    for (const LayerSummary& l : s_.layers)
      names.push_back(l.window > 0 ? fmt::format("window {}", l.window) : "full");
    data["layer_names"] = names;
    Json maps = maps_json(
        {kMapLow,
         kMapHigh,
         "of the query's attention",
         "mean over heads",
         "Queries from top to bottom, keys from left to right. A vertical line is a key that all look at, a "
         "diagonal is a "
         "distance. A cell holds the sum over its keys, so single bright keys stay visible.",
         {"key", s_.tokens, 0},
         {"query", s_.tokens, 0}});
    maps["causal"] = true;
    std::vector<Json> layers(s_.layers.size());
    pool.parallel_for(std::ssize(layers), [&](std::int64_t i, int) {
      const LayerSummary& l = s_.layers[static_cast<std::size_t>(i)];
      Json layer = {packed_map(l.map, l.side, kMapLow, kMapHigh)};
      for (const auto& map : l.head_map) layer.push_back(packed_map(map, l.head_side, kMapLow, kMapHigh));
      layers[static_cast<std::size_t>(i)] = std::move(layer);
    });
    maps["layers"] = std::move(layers);
    data["maps"] = maps;
    if (!labels.empty() && labels.size() <= kMostLabels) data["labels"] = labels;

    data["grid"] = grid();
    data["curves"] = curves();
    data["overall"] = overall();
    return data;
  }

 private:
  // Numbers of every layer and head.
  Json grid() const {
    Json grid = Json::array();
    const auto metric = [&](const std::string& name, const std::string& help, const auto& values,
                            bool share) {
      Json m;
      m["name"] = name;
      m["help"] = help;
      if (share) {
        m["low"] = 0;
        m["high"] = 1;
      }
      m["values"] = Json::array();
      for (const LayerSummary& l : s_.layers) m["values"].push_back(numbers(values(l)));
      grid.push_back(m);
    };
    metric(
        "first token", "mean weight on the first token",
        [](const LayerSummary& l) { return l.importance[0]; }, true);
    for (std::size_t n = 1; n < s_.sink_counts.size(); ++n) {
      metric(
          fmt::format("first {} tokens", s_.sink_counts[n]), "mean mass of the first tokens",
          [n](const LayerSummary& l) { return l.sink_mass[n]; }, true);
    }
    if (has_learned_sink()) {
      metric(
          "learned sink", "mean mass of the learned sink",
          [](const LayerSummary& l) { return l.learned_sink; }, true);
    }
    for (std::size_t w = 0; w < s_.windows.size(); ++w) {
      metric(
          fmt::format("last {} tokens", s_.windows[w]), "mean mass of the most recent tokens, self included",
          [w](const LayerSummary& l) { return l.local_mass[w]; }, true);
    }
    metric(
        "entropy", "mean, in nats", [](const LayerSummary& l) { return l.entropy; }, false);
    for (std::size_t i = 0; i < kBudgetShares.size(); ++i) {
      metric(
          fmt::format("keys for {}", kShareNames[i]), "mean number of keys that hold this share of the mass",
          [i](const LayerSummary& l) { return l.budget[i]; }, false);
    }
    return grid;
  }

  // One chart each, for the layer that is chosen.
  Json curves() const {
    Json curves = Json::array();
    Json curve;
    curve["title"] = "Weight against distance";
    curve["help"] = "Mean weight on the key so many tokens back, over the queries that reach so far.";
    curve["xlabel"] = "distance, in tokens";
    curve["xlog"] = curve["ylog"] = true;
    curve["x"] = Json::array();
    for (const auto& [x, y] : s_.layers[0].distance) curve["x"].push_back(rounded(x - 1.0 < 0.5 ? 1.0 : x));
    curve["layers"] = Json::array();
    for (const LayerSummary& l : s_.layers) {
      Json layer = Json::array();
      for (std::size_t h = 0; h < l.head_distance.size(); ++h) {
        layer.push_back({{"head", h}, {"y", ys(l.head_distance[h])}});
      }
      layer.push_back({{"name", "mean"}, {"y", ys(l.distance)}});
      curve["layers"].push_back(layer);
    }
    curves.push_back(curve);

    curve = Json();
    curve["title"] = "Weight against position";
    curve["help"] = "Mean weight on the key at a position (the first is 1), over the queries that see it.";
    curve["xlabel"] = "position of the key";
    curve["xlog"] = curve["ylog"] = true;
    curve["x"] = Json::array();
    for (const auto& [x, y] : s_.layers[0].position) curve["x"].push_back(rounded(x));
    curve["layers"] = Json::array();
    for (const LayerSummary& l : s_.layers)
      curve["layers"].push_back({{{"name", "mean over heads"}, {"y", ys(l.position)}}});
    curves.push_back(curve);

    curve = Json();
    curve["title"] = "Along the text";
    curve["help"] = "Mean over heads, by position of the query.";
    curve["xlabel"] = "position of the query";
    curve["x"] = query_positions(64);
    curve["layers"] = Json::array();
    for (const LayerSummary& l : s_.layers) {
      Json layer = Json::array();
      if (!l.sink4_by_query.empty()) {
        layer.push_back(
            {{"name", s_.sink_counts.size() > 1 ? "mass of the first 4 tokens" : "mass of the first token"},
             {"y", thin(l.sink4_by_query, 64, 1.0)}});
      }
      layer.push_back({{"name", "entropy / log of the visible keys"}, {"y", relative_entropy(l, 64)}});
      curve["layers"].push_back(layer);
    }
    curve["ylow"] = 0;
    curve["yhigh"] = 1;
    curves.push_back(curve);

    curve = Json();
    curve["title"] = "Retained mass against the window";
    curve["help"] =
        "Mean over heads: share that the first n and the last w tokens hold, where that hides something.";
    curve["xlabel"] = "window, in tokens";
    curve["xlog"] = true;
    curve["x"] = s_.windows;
    curve["yhigh"] = 1;
    curve["layers"] = Json::array();
    for (const LayerSummary& l : s_.layers) {
      Json layer = Json::array();
      for (const std::size_t n : shown_sinks())
        layer.push_back({{"name", sink_name(n)}, {"y", retained_by_window(l, n)}});
      curve["layers"].push_back(layer);
    }
    curves.push_back(curve);
    return curves;
  }

  // Of all layers together.
  Json overall() const {
    Json all = Json::array();
    Json overall;
    overall["title"] = "Retained mass, mean over layers and heads";
    overall["xlabel"] = "window, in tokens";
    overall["xlog"] = true;
    overall["x"] = s_.windows;
    overall["yhigh"] = 1;
    overall["series"] = Json::array();
    for (const std::size_t n : shown_sinks()) {
      Json y = Json::array();
      for (std::size_t w = 0; w < s_.windows.size(); ++w) y.push_back(rounded(model_retained(n, w)));
      overall["series"].push_back({{"name", sink_name(n)}, {"y", y}});
    }
    all.push_back(overall);
    overall = Json();
    overall["title"] = "Sinks and budgets by layer";
    overall["help"] = "Mean over heads.";
    overall["xlabel"] = "layer";
    overall["x"] = Json::array();
    Json first = Json::array(), four = Json::array();
    for (std::size_t i = 0; i < s_.layers.size(); ++i) {
      overall["x"].push_back(i);
      first.push_back(rounded(mean(s_.layers[i].importance[0])));
      if (s_.sink_counts.size() > 1) four.push_back(rounded(mean(s_.layers[i].sink_mass[1])));
    }
    overall["ylow"] = 0;
    overall["yhigh"] = 1;
    overall["series"] = {{{"name", "weight on the first token"}, {"y", first}}};
    if (s_.sink_counts.size() > 1)
      overall["series"].push_back({{"name", "mass of the first 4"}, {"y", four}});
    all.push_back(overall);
    overall = Json();
    overall["title"] = "Keys that hold a share of the mass, by layer";
    overall["xlabel"] = "layer";
    overall["ylog"] = true;
    overall["x"] = all[1]["x"];
    overall["series"] = Json::array();
    for (std::size_t i = 0; i < kBudgetShares.size(); ++i) {
      Json y = Json::array();
      for (const LayerSummary& l : s_.layers) y.push_back(rounded(mean(l.budget[i])));
      overall["series"].push_back({{"name", kShareNames[i]}, {"y", y}});
    }
    all.push_back(overall);
    return all;
  }

  Json retained_by_window(const LayerSummary& l, std::size_t n) const {
    Json y = Json::array();
    for (std::size_t w = 0; w < s_.windows.size(); ++w) {
      y.push_back(hides(n, w) ? rounded(mean(l.retained[n][w])) : Json(nullptr));
    }
    return y;
  }
  static Json ys(const Curve& curve) {
    Json out = Json::array();
    for (const auto& [x, y] : curve) out.push_back(rounded(y));
    return out;
  }
  static Json thin(const std::vector<float>& values, std::size_t most, double factor) {
    Json out = Json::array();
    const std::size_t steps = std::min(values.size(), most);
    for (std::size_t k = 0; k < steps; ++k) {
      const std::size_t begin = k * values.size() / steps,
                        end = std::max(begin + 1, (k + 1) * values.size() / steps);
      double sum = 0.0;
      for (std::size_t i = begin; i < end; ++i) sum += static_cast<double>(values[i]);
      out.push_back(rounded(factor * sum / static_cast<double>(end - begin)));
    }
    return out;
  }
  Json query_positions(std::size_t most) const {
    const std::size_t bins = s_.layers[0].entropy_by_query.size();
    std::vector<float> positions;
    for (std::size_t i = 0; i < bins; ++i) {
      positions.push_back((static_cast<float>(i) + 0.5f) * static_cast<float>(s_.bin_tokens));
    }
    return thin(positions, most, 1.0);
  }
  Json relative_entropy(const LayerSummary& l, std::size_t most) const {
    std::vector<float> values;
    for (std::size_t i = 0; i < l.entropy_by_query.size(); ++i) {
      const double keys = (static_cast<double>(i) + 0.5) * static_cast<double>(s_.bin_tokens) + 1.0;
      values.push_back(
          static_cast<float>(static_cast<double>(l.entropy_by_query[i]) / std::log(std::max(2.0, keys))));
    }
    return thin(values, most, 1.0);
  }
};

}  // namespace

Json model_page(const ModelSummary& summary, const Advice& advice, const std::vector<std::string>& lines,
                const std::vector<std::string>& labels, ThreadPool& pool) {
  return ModelPage(summary, advice).json(lines, labels, pool);
}

}  // namespace basin::probe
