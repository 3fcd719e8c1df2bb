// The report of a probed model.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "probe/png.h"
#include "probe/report.h"

namespace basin::probe {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMapLow = -6.0, kMapHigh = 0.0;  // log10 of the share of a query's mass in a key bin
constexpr std::size_t kMostLabels = 40'000;

double mean(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float v : values) sum += static_cast<double>(v);
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

class ModelReport {
 public:
  ModelReport(const ModelSummary& summary, const Advice& advice) : s_(summary), advice_(advice) {}

  std::vector<Figure> figures() const {
    std::vector<Figure> all = {heads(),    maps(),   distance(), position(),
                               retained(), budget(), by_query(), sink_rate()};
    if (!advice_.grid.empty()) all.push_back(pareto());
    if (!advice_.measured.empty()) all.push_back(measured());
    return all;
  }

  std::vector<std::string> sentences() const {
    std::vector<std::string> lines;
    lines.push_back(
        fmt::format("{} read {} tokens; each query sees {}. {} layers of {} query heads on {} key heads.",
                    s_.model, s_.tokens, s_.reading, s_.layers.size(), s_.heads, s_.kv_heads));
    const std::vector<double> first =
        over_layers([](const LayerSummary& l) { return mean(l.importance[0]); });
    const auto strongest = std::max_element(first.begin(), first.end()) - first.begin();
    lines.push_back(fmt::format(
        "The first token takes {} of a query's attention on average, and most, {}, in layer {}. A head "
        "counts as a sink "
        "head when its mean weight on the first token exceeds {:.1f}: {:.0f} % of all heads do over the "
        "whole text, "
        "{:.0f} % over its first {} tokens, as the rate is published.",
        percent(average(first)), percent(first[static_cast<std::size_t>(strongest)]), strongest,
        kSinkThreshold, 100.0 * rate(0, false), 100.0 * rate(0, true), std::min(kEarlyTokens, s_.tokens)));
    if (has_learned_sink()) {
      lines.push_back(fmt::format(
          "The learned sink takes {} on average.",
          percent(average(over_layers([](const LayerSummary& l) { return mean(l.learned_sink); })))));
    }
    if (!s_.sink_counts.empty()) {
      for (const std::int64_t window : {64, 1024}) {
        const auto w = std::find(s_.windows.begin(), s_.windows.end(), window);
        if (w == s_.windows.end()) continue;
        const auto index = static_cast<std::size_t>(w - s_.windows.begin());
        lines.push_back(fmt::format(
            "The last {} tokens, self included, hold {} of the attention.", window,
            percent(average(over_layers([&](const LayerSummary& l) { return mean(l.local_mass[index]); })))));
      }
    }
    lines.push_back(fmt::format(
        "A head needs {:.0f} keys on average for 90 % of its attention, {:.0f} for 95 % and {:.0f} for 99 %.",
        average_budget(0), average_budget(1), average_budget(2)));
    if (!advice_.grid.empty()) {
      if (advice_.chosen.empty()) {
        lines.push_back(
            fmt::format("No pair of sink tokens and window below the length of the text keeps {} of the "
                        "attention: read it whole.",
                        percent(advice_.target)));
      } else {
        const Choice& c = advice_.chosen[0];
        lines.push_back(fmt::format(
            "To keep {} of the attention it takes --sink-tokens {} --window {}: that keeps {} on average "
            "over layers and "
            "heads and {} in the layer that keeps least.{}",
            percent(advice_.target), c.pair.sink_tokens, c.pair.window, percent(c.retained),
            percent(c.weakest),
            std::isfinite(c.output_error)
                ? fmt::format(
                      " The attention output of a layer then differs by {} (relative, mean over layers, each "
                      "fed with what the whole model feeds it).",
                      percent(c.output_error))
                : ""));
      }
    }
    for (const Measured& m : advice_.measured) {
      lines.push_back(fmt::format("Measured perplexity, {}: {:.3f} (mean NLL {:.4f}).", m.name, m.perplexity,
                                  m.mean_nll));
    }
    const double error = row_error();
    lines.push_back(fmt::format("Check: the weights of a row{} sum to 1 within {:.1e}, over all {} rows.",
                                has_learned_sink() ? " and its learned sink" : "", error,
                                s_.tokens * s_.heads * static_cast<std::int64_t>(s_.layers.size())));
    return lines;
  }

  Json summary_json() const {
    Json out;
    out["schema"] = "basin.probe.model/1";
    out["model"] = s_.model;
    out["tokens"] = s_.tokens;
    out["reading"] = s_.reading;
    out["heads"] = s_.heads;
    out["kv_heads"] = s_.kv_heads;
    out["sink_counts"] = s_.sink_counts;
    out["windows"] = s_.windows;
    out["sink_threshold"] = kSinkThreshold;
    out["largest_row_error"] = row_error();
    out["sink_rate"] = Json::array();
    out["sink_rate_early"] = Json::array();
    for (std::size_t key = 0; key < s_.layers[0].importance.size(); ++key) {
      out["sink_rate"].push_back(rounded(rate(key, false)));
      out["sink_rate_early"].push_back(rounded(rate(key, true)));
    }
    out["layers"] = Json::array();
    for (std::size_t i = 0; i < s_.layers.size(); ++i) {
      const LayerSummary& l = s_.layers[i];
      Json layer;
      layer["window"] = l.window;
      layer["importance_of_first_key"] = numbers(l.importance[0]);
      layer["learned_sink"] = numbers(l.learned_sink);
      layer["sink_mass"] = tables(l.sink_mass);
      layer["local_mass"] = tables(l.local_mass);
      layer["entropy"] = numbers(l.entropy);
      layer["budget_90_95_99"] = tables(l.budget);
      layer["group_budget_90_95_99"] = tables(l.group_budget);
      layer["retained"] = Json::array();
      for (const auto& of_sinks : l.retained) {
        Json row = Json::array();
        for (const auto& of_window : of_sinks) row.push_back(rounded(mean(of_window)));
        layer["retained"].push_back(row);
      }
      if (!advice_.of_layer.empty() && !advice_.of_layer[i].empty()) {
        layer["pair_for_target"] = {advice_.of_layer[i][0].sink_tokens, advice_.of_layer[i][0].window};
      }
      out["layers"].push_back(layer);
    }
    Json advice;
    advice["target"] = advice_.target;
    const auto choices = [](const std::vector<Choice>& list) {
      Json rows = Json::array();
      for (const Choice& c : list) {
        rows.push_back({{"sink_tokens", c.pair.sink_tokens},
                        {"window", c.pair.window},
                        {"retained", rounded(c.retained)},
                        {"weakest_layer", rounded(c.weakest)},
                        {"output_error", rounded(c.output_error)}});
      }
      return rows;
    };
    advice["pareto"] = choices(advice_.pareto);
    advice["chosen"] = choices(advice_.chosen);
    advice["measured"] = Json::array();
    for (const Measured& m : advice_.measured) {
      advice["measured"].push_back({{"name", m.name},
                                    {"sink_tokens", m.pair.sink_tokens},
                                    {"window", m.pair.window},
                                    {"mean_nll", m.mean_nll},
                                    {"perplexity", m.perplexity}});
    }
    out["advice"] = advice;
    return out;
  }

  Json page_json(const std::vector<std::string>& lines, const std::vector<std::string>& labels) const {
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
    Json maps;
    maps["low"] = kMapLow;
    maps["high"] = kMapHigh;
    maps["unit"] = "of the query's attention";
    maps["mean"] = "mean over heads";
    maps["help"] =
        "Queries from top to bottom, keys from left to right. A vertical line is a key that all look at, a "
        "diagonal is a "
        "distance. A cell holds the sum over its keys, so single bright keys stay visible.";
    maps["x_name"] = "key";
    maps["y_name"] = "query";
    maps["x_tokens"] = maps["y_tokens"] = s_.tokens;
    maps["x_first"] = maps["y_first"] = 0;
    maps["causal"] = true;
    maps["layers"] = Json::array();
    for (const LayerSummary& l : s_.layers) {
      Json layer = {packed_map(l.map, l.side, kMapLow, kMapHigh)};
      for (const auto& map : l.head_map) layer.push_back(packed_map(map, l.head_side, kMapLow, kMapHigh));
      maps["layers"].push_back(layer);
    }
    data["maps"] = maps;
    if (!labels.empty() && labels.size() <= kMostLabels) data["labels"] = labels;

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
    const char* const shares[] = {"90 %", "95 %", "99 %"};
    for (std::size_t i = 0; i < kBudgetShares.size(); ++i) {
      metric(
          fmt::format("keys for {}", shares[i]), "mean number of keys that hold this share of the mass",
          [i](const LayerSummary& l) { return l.budget[i]; }, false);
    }
    data["grid"] = grid;

    data["curves"] = Json::array();
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
    data["curves"].push_back(curve);

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
    data["curves"].push_back(curve);

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
    data["curves"].push_back(curve);

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
    data["curves"].push_back(curve);

    data["overall"] = Json::array();
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
    data["overall"].push_back(overall);
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
    data["overall"].push_back(overall);
    overall = Json();
    overall["title"] = "Keys that hold a share of the mass, by layer";
    overall["xlabel"] = "layer";
    overall["ylog"] = true;
    overall["x"] = data["overall"][1]["x"];
    overall["series"] = Json::array();
    for (std::size_t i = 0; i < kBudgetShares.size(); ++i) {
      Json y = Json::array();
      for (const LayerSummary& l : s_.layers) y.push_back(rounded(mean(l.budget[i])));
      overall["series"].push_back({{"name", shares[i]}, {"y", y}});
    }
    data["overall"].push_back(overall);
    return data;
  }

 private:
  // --- Figures ---

  Figure heads() const {
    Figure figure{"heads", {}};
    figure.sheet.title = fmt::format("{}: every layer and head", s_.model);
    figure.sheet.caption = fmt::format(
        "Means over all {} queries. Left: weight on the first token. Middle: mass of the {} most recent "
        "tokens, self "
        "included. Right: number of keys that hold 95 % of the mass, as log10.",
        s_.tokens, local_window());
    figure.sheet.columns = 3;
    figure.sheet.panel_width = 400;
    figure.sheet.panel_height =
        std::clamp(110.0 + 15.0 * static_cast<double>(s_.layers.size()), 300.0, 760.0);
    const auto panel = [&](const std::string& title, double low, double high,
                           const std::vector<std::string>& labels, const auto& value) {
      Panel p;
      p.title = title;
      p.x_label = "head";
      p.y_label = "layer";
      p.colour_bar = labels;
      std::vector<float> map;
      for (const LayerSummary& l : s_.layers) {
        for (const float v : value(l)) map.push_back(v);
      }
      const auto rows = static_cast<std::int64_t>(s_.layers.size());
      p.image = Image{coloured_map(map, s_.heads, rows, low, high, false), -0.5,
                      static_cast<double>(s_.heads) - 0.5, -0.5, static_cast<double>(rows) - 0.5};
      figure.sheet.panels.push_back(p);
    };
    const std::vector<std::string> share = {"0", "0.25", "0.5", "0.75", "1"};
    panel("first token", 0.0, 1.0, share, [](const LayerSummary& l) { return l.importance[0]; });
    const std::size_t w = local_index();
    panel(fmt::format("last {} tokens", s_.windows[w]), 0.0, 1.0, share,
          [w](const LayerSummary& l) { return l.local_mass[w]; });
    const double most = std::max(1.0, std::ceil(std::log10(static_cast<double>(s_.tokens))));
    std::vector<std::string> powers;
    for (int i = 0; i <= static_cast<int>(most); ++i)
      powers.push_back(fmt::format("{:.0f}", std::pow(10, i)));
    panel("keys for 95 %", 0.0, most, powers, [](const LayerSummary& l) {
      std::vector<float> logs;
      for (const float v : l.budget[1]) logs.push_back(std::log10(std::max(v, 1.0f)));
      return logs;
    });
    return figure;
  }

  Figure maps() const {
    Figure figure{"maps", {}};
    figure.sheet.title = fmt::format("{}: attention maps, mean over heads", s_.model);
    figure.sheet.caption =
        "Queries from top to bottom, keys from left to right; colour: share of the query's attention in the "
        "cell, log "
        "scale. A cell sums its keys, so a single bright key stays a line.";
    const auto count = std::min<std::size_t>(s_.layers.size(), 9);
    figure.sheet.columns = 3;
    figure.sheet.panel_width = 400;
    figure.sheet.panel_height = 366;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t layer = count == 1 ? 0 : i * (s_.layers.size() - 1) / (count - 1);
      const LayerSummary& l = s_.layers[layer];
      Panel p;
      p.title = fmt::format("layer {}{}", layer, l.window > 0 ? fmt::format(", window {}", l.window) : "");
      p.x_label = "key";
      p.y_label = "query";
      p.colour_bar = {"1e-5", "1e-4", "1e-3", "0.01", "0.1", "1"};
      const auto tokens = static_cast<double>(s_.tokens);
      p.image = Image{coloured_map(causal(l.map, l.side), l.side, l.side, -5.0, 0.0, true), 0.0, tokens, 0.0,
                      tokens};
      figure.sheet.panels.push_back(p);
    }
    return figure;
  }

  Figure curves_of_layers(const std::string& name, const std::string& title, const std::string& x_label,
                          Curve LayerSummary::*curve, const std::string& caption) const {
    Figure figure{name, {}};
    figure.sheet.title = fmt::format("{}: {}", s_.model, title);
    figure.sheet.caption = caption;
    figure.sheet.panel_width = 760;
    figure.sheet.panel_height = 420;
    Panel p;
    p.x_label = x_label;
    p.y_label = "mean weight";
    p.x_scale = p.y_scale = Scale::log10;
    Curve total = s_.layers[0].*curve;
    for (auto& [x, y] : total) y = 0.0;
    for (std::size_t i = 0; i < s_.layers.size(); ++i) {
      const Curve& points = s_.layers[i].*curve;
      for (std::size_t k = 0; k < points.size(); ++k) {
        total[k].second += points[k].second / static_cast<double>(s_.layers.size());
      }
      const bool named = i == 0 || i + 1 == s_.layers.size() || i == s_.layers.size() / 2;
      p.lines.push_back({named ? fmt::format("layer {}", i) : "", points, ordered_colour(i, s_.layers.size()),
                         1.0, "", false});
    }
    p.lines.push_back({"mean of all layers", total, "#000000", 2.6, "", false});
    figure.sheet.panels.push_back(p);
    return figure;
  }

  Figure distance() const {
    return curves_of_layers(
        "distance", "weight against distance", "distance, in tokens (1 = the token itself)",
        &LayerSummary::distance,
        "Mean weight on the key so many tokens back, over heads and the queries that reach so far. The rise "
        "at the far "
        "end is the sink: the queries that reach so far back see the first tokens there.");
  }
  Figure position() const {
    return curves_of_layers("position", "weight against position", "position of the key (the first is 1)",
                            &LayerSummary::position,
                            "Mean weight on the key at a position, over heads and the queries that see it.");
  }

  Figure retained() const {
    Figure figure{"retained", {}};
    figure.sheet.title = fmt::format("{}: what sink tokens and a window keep", s_.model);
    figure.sheet.caption =
        "Share of the attention on the first n and the last w tokens, mean over layers, heads and the "
        "queries from which "
        "this hides something. Band: from the weakest to the strongest layer, with 4 sink tokens.";
    figure.sheet.panel_width = 700;
    figure.sheet.panel_height = 420;
    Panel p;
    p.x_label = "window w, in tokens";
    p.y_label = "retained share";
    p.x_scale = Scale::log2;
    p.y_low = 0.0;
    p.y_high = 1.0;
    if (s_.sink_counts.size() > 1) {
      Band band;
      band.colour = series_colour(2);
      for (std::size_t w = 0; w < s_.windows.size(); ++w) {
        double low = 1.0, high = 0.0;
        for (const LayerSummary& l : s_.layers) {
          if (l.window > 0) continue;
          low = std::min(low, mean(l.retained[2][w]));
          high = std::max(high, mean(l.retained[2][w]));
        }
        if (!hides(2, w)) continue;
        band.x.push_back(static_cast<double>(s_.windows[w]));
        band.low.push_back(low);
        band.high.push_back(high);
      }
      p.bands.push_back(band);
    }
    for (const std::size_t n : shown_sinks()) {
      Line line{sink_name(n), {}, series_colour(n), 2.0, "", true};
      for (std::size_t w = 0; w < s_.windows.size(); ++w) {
        if (hides(n, w)) line.points.emplace_back(static_cast<double>(s_.windows[w]), model_retained(n, w));
      }
      p.lines.push_back(line);
    }
    if (!advice_.grid.empty())
      p.marks.push_back({advice_.target, fmt::format("target {}", percent(advice_.target)), false});
    figure.sheet.panels.push_back(p);
    return figure;
  }

  Figure budget() const {
    Figure figure{"budget", {}};
    figure.sheet.title = fmt::format("{}: keys that hold the attention, by layer", s_.model);
    figure.sheet.caption =
        "Smallest number of keys that hold 90, 95 and 99 % of the mass, mean over heads and queries (solid), "
        "and for the "
        "mean over the query heads that share a key head (dashed): what a kernel that selects keys per key "
        "head would need.";
    figure.sheet.panel_width = 700;
    figure.sheet.panel_height = 400;
    Panel p;
    p.x_label = "layer";
    p.y_label = "keys";
    p.y_scale = Scale::log10;
    const char* const names[] = {"90 %", "95 %", "99 %"};
    for (std::size_t i = 0; i < kBudgetShares.size(); ++i) {
      Line one{names[i], {}, series_colour(i), 2.0, "", true};
      Line group{s_.heads > s_.kv_heads ? fmt::format("{} per key head", names[i]) : "",
                 {},
                 series_colour(i),
                 1.4,
                 "6 4",
                 false};
      for (std::size_t l = 0; l < s_.layers.size(); ++l) {
        one.points.emplace_back(static_cast<double>(l), mean(s_.layers[l].budget[i]));
        group.points.emplace_back(static_cast<double>(l), mean(s_.layers[l].group_budget[i]));
      }
      p.lines.push_back(one);
      if (s_.heads > s_.kv_heads) p.lines.push_back(group);
    }
    figure.sheet.panels.push_back(p);
    return figure;
  }

  Figure by_query() const {
    Figure figure{"along_the_text", {}};
    figure.sheet.title = fmt::format("{}: along the text", s_.model);
    figure.sheet.caption =
        "Mean over heads by position of the query, one line per layer from dark (first) to light (last); "
        "black: all layers.";
    figure.sheet.columns = 2;
    figure.sheet.panel_width = 520;
    figure.sheet.panel_height = 360;
    const auto panel = [&](const std::string& title, const std::string& y, Scale scale,
                           std::vector<float> LayerSummary::*values) {
      Panel p;
      p.title = title;
      p.x_label = "position of the query";
      p.y_label = y;
      p.y_scale = scale;
      p.legend = false;
      if (scale == Scale::linear) {
        p.y_low = 0.0;
        p.y_high = 1.0;
      }
      Curve total;
      for (std::size_t i = 0; i < s_.layers.size(); ++i) {
        const std::vector<float>& all = s_.layers[i].*values;
        const auto steps = std::min<std::size_t>(all.size(), 128);
        Line line{"", {}, ordered_colour(i, s_.layers.size()), 1.0, "", false};
        total.resize(steps);
        for (std::size_t k = 0; k < steps; ++k) {
          const std::size_t begin = k * all.size() / steps,
                            end = std::max(begin + 1, (k + 1) * all.size() / steps);
          double sum = 0.0;
          for (std::size_t b = begin; b < end; ++b) sum += static_cast<double>(all[b]);
          const double x = static_cast<double>(begin + end) / 2.0 * static_cast<double>(s_.bin_tokens);
          line.points.emplace_back(x, sum / static_cast<double>(end - begin));
          total[k].first = x;
          total[k].second += line.points.back().second / static_cast<double>(s_.layers.size());
        }
        p.lines.push_back(line);
      }
      p.lines.push_back({"", total, "#000000", 2.6, "", false});
      figure.sheet.panels.push_back(p);
    };
    panel(s_.sink_counts.size() > 1 ? "mass of the first 4 tokens" : "mass of the first token", "mass",
          Scale::linear, &LayerSummary::sink4_by_query);
    panel("keys for 95 % of the mass", "keys", Scale::log10, &LayerSummary::budget95_by_query);
    return figure;
  }

  Figure sink_rate() const {
    Figure figure{"sink_rate", {}};
    figure.sheet.title = fmt::format("{}: sink rate of the first keys", s_.model);
    figure.sheet.caption = fmt::format(
        "Share of all layers and heads whose mean weight on the key, over the queries that see it, exceeds "
        "{:.1f} "
        "(arXiv 2410.10781). T: number of queries; the rate depends on it and is published for T = 64.",
        kSinkThreshold);
    figure.sheet.panel_width = 620;
    figure.sheet.panel_height = 340;
    Panel p;
    p.x_label = "key (0 = the first)";
    p.y_label = "share of heads";
    p.y_low = 0.0;
    p.y_high = 1.0;
    Line early{fmt::format("T = {}", std::min(kEarlyTokens, s_.tokens)), {}, series_colour(1), 2.0, "", true};
    Line all{fmt::format("T = {}", s_.tokens), {}, series_colour(0), 2.0, "", true};
    for (std::size_t key = 0; key < s_.layers[0].importance.size(); ++key) {
      early.points.emplace_back(static_cast<double>(key), rate(key, true));
      all.points.emplace_back(static_cast<double>(key), rate(key, false));
    }
    p.lines = {early, all};
    figure.sheet.panels.push_back(p);
    return figure;
  }

  Figure pareto() const {
    Figure figure{"advice", {}};
    figure.sheet.title = fmt::format("{}: sink tokens and window for a share of the attention", s_.model);
    figure.sheet.caption =
        "Every dot is a pair of sink tokens and window; the line joins those that no cheaper pair beats. "
        "Right: how much "
        "the attention output of a layer changes (relative, mean over layers; each layer is fed what the "
        "whole model feeds "
        "it).";
    figure.sheet.columns = 2;
    figure.sheet.panel_width = 540;
    figure.sheet.panel_height = 400;
    Panel left, right;
    left.title = "retained share";
    right.title = "error of the attention output";
    left.x_label = right.x_label = "tokens kept: sink tokens + window";
    left.y_label = "mean over layers and heads";
    right.y_label = "relative error";
    left.x_scale = right.x_scale = Scale::log2;
    left.y_low = 0.0;
    left.y_high = 1.0;
    right.y_low = 0.0;
    for (const std::size_t n : shown_sinks()) {
      Line kept{"", {}, series_colour(n), 1.0, "2 5", true};
      Line lost{sink_name(n), {}, series_colour(n), 1.8, "", true};
      for (const Choice& c : advice_.grid) {
        if (c.pair.sink_tokens != sinks(n)) continue;
        const auto cost = static_cast<double>(c.pair.sink_tokens + c.pair.window);
        kept.points.emplace_back(cost, c.retained);
        if (std::isfinite(c.output_error)) lost.points.emplace_back(cost, c.output_error);
      }
      kept.label = lost.label;
      left.lines.push_back(kept);
      if (!lost.points.empty()) right.lines.push_back(lost);
    }
    Line best{"no cheaper pair is better", {}, "#000000", 2.2, "", false};
    for (const Choice& c : advice_.pareto) {  // steps: a pair is the best until the next dearer one
      const auto cost = static_cast<double>(c.pair.sink_tokens + c.pair.window);
      if (!best.points.empty()) best.points.emplace_back(cost, best.points.back().second);
      best.points.emplace_back(cost, c.retained);
    }
    left.lines.push_back(best);
    left.marks.push_back({advice_.target, fmt::format("target {}", percent(advice_.target)), false});
    for (const Choice& c : advice_.chosen) {
      const auto cost = static_cast<double>(c.pair.sink_tokens + c.pair.window);
      const Mark mark{cost, fmt::format("{} + {}", c.pair.sink_tokens, c.pair.window), true};
      left.marks.push_back(mark);
      right.marks.push_back(mark);
    }
    figure.sheet.panels = {left, right};
    return figure;
  }

  Figure measured() const {
    Figure figure{"measured", {}};
    figure.sheet.title = fmt::format("{}: predicted and measured", s_.model);
    figure.sheet.caption =
        "Horizontal: share of the attention that the pair loses, mean over layers and heads (predicted by "
        "the probe). "
        "Vertical: mean NLL measured with the pair on the same text, above that of reading all of it.";
    figure.sheet.panel_width = 620;
    figure.sheet.panel_height = 380;
    Panel p;
    p.x_label = "lost share of the attention (predicted)";
    p.y_label = "added mean NLL, in nats (measured)";
    double whole = 0.0;
    for (const Measured& m : advice_.measured) {
      if (m.pair.window == 0) whole = m.mean_nll;
    }
    std::size_t colour = 0;
    for (const Measured& m : advice_.measured) {
      if (m.pair.window == 0) continue;
      for (const Choice& c : advice_.grid) {
        if (c.pair.sink_tokens != m.pair.sink_tokens || c.pair.window != m.pair.window) continue;
        p.lines.push_back({fmt::format("{} + {}", m.pair.sink_tokens, m.pair.window),
                           {{1.0 - c.retained, m.mean_nll - whole}},
                           series_colour(colour++),
                           1.8,
                           "",
                           true});
      }
    }
    p.x_low = 0.0;
    figure.sheet.panels.push_back(p);
    return figure;
  }

  // The map with nothing above the diagonal, where no query looks.
  static std::vector<float> causal(std::vector<float> map, std::int64_t side) {
    for (std::int64_t i = 0; i < side; ++i) {
      for (std::int64_t j = i + 1; j < side; ++j) map[static_cast<std::size_t>(i * side + j)] = std::nanf("");
    }
    return map;
  }

  // --- Numbers ---

  static std::string percent(double share) {
    return share < 0.0995 || share > 0.9905 ? fmt::format("{:.1f} %", 100.0 * share)
                                            : fmt::format("{:.0f} %", 100.0 * share);
  }
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
  Json retained_by_window(const LayerSummary& l, std::size_t n) const {
    Json y = Json::array();
    for (std::size_t w = 0; w < s_.windows.size(); ++w) {
      y.push_back(hides(n, w) ? rounded(mean(l.retained[n][w])) : Json(nullptr));
    }
    return y;
  }
  std::size_t local_index() const {
    for (std::size_t w = 0; w < s_.windows.size(); ++w) {
      if (s_.windows[w] == 256) return w;
    }
    return s_.windows.size() - 1;
  }
  std::int64_t local_window() const { return s_.windows[local_index()]; }

  static Json numbers(const std::vector<float>& values) {
    Json out = Json::array();
    for (const float v : values) out.push_back(rounded(static_cast<double>(v)));
    return out;
  }
  static Json tables(const std::vector<std::vector<float>>& rows) {
    Json out = Json::array();
    for (const auto& row : rows) out.push_back(numbers(row));
    return out;
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

  const ModelSummary& s_;
  const Advice& advice_;
};

}  // namespace

std::vector<std::string> write_model_report(const std::filesystem::path& folder, const ModelSummary& summary,
                                            const Advice& advice, const std::vector<std::string>& labels) {
  const ModelReport report(summary, advice);
  const std::vector<std::string> lines = report.sentences();
  write_figures(folder, report.figures());
  write_text(folder / "report.html", page(report.page_json(lines, labels)));
  write_text(folder / "summary.json", report.summary_json().dump(1) + "\n");
  std::string text;
  for (const std::string& line : lines) text += line + "\n\n";
  write_text(folder / "summary.txt", text);
  return lines;
}

}  // namespace basin::probe
