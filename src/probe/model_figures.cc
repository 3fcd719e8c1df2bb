// The figures of a model's report.
#include "probe/model_view.h"
#include "probe/png.h"

namespace basin::probe {
namespace {

class ModelFigures : ModelView {
 public:
  using ModelView::ModelView;

  std::vector<Figure> all() const {
    std::vector<Figure> figures = {heads(),    maps(),   distance(), position(),
                                   retained(), budget(), by_query(), sink_rate()};
    if (!advice_.grid.empty()) figures.push_back(pareto());
    if (!advice_.measured.empty()) figures.push_back(measured());
    return figures;
  }

 private:
  Figure heads() const {
    Figure made = figure(
        "heads", fmt::format("{}: every layer and head", s_.model),
        fmt::format(
            "Means over all {} queries. Left: weight on the first token. Middle: mass of the {} most recent "
            "tokens, self "
            "included. Right: number of keys that hold 95 % of the mass, log scale.",
            s_.tokens, local_window()),
        {400, std::clamp(110.0 + 15.0 * static_cast<double>(s_.layers.size()), 300.0, 760.0), 3});
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
      made.sheet.panels.push_back(p);
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
    return made;
  }

  Figure maps() const {
    Figure made = figure(
        "maps", fmt::format("{}: attention maps, mean over heads", s_.model),
        "Queries from top to bottom, keys from left to right; colour: share of the query's attention in the "
        "cell, log "
        "scale. A cell sums its keys, so a single bright key stays a line.",
        {440, 368, 3});
    for (const std::size_t layer : shown_layers(9)) {
      const LayerSummary& l = s_.layers[layer];
      Panel p;
      p.title = fmt::format("layer {}{}", layer, l.window > 0 ? fmt::format(", window {}", l.window) : "");
      p.x_label = "key";
      p.y_label = "query";
      for (int exponent = -5; exponent < 0; ++exponent) p.colour_bar.push_back(power_of_ten(exponent));
      p.colour_bar.push_back("1");
      const auto tokens = static_cast<double>(s_.tokens);
      p.image = Image{coloured_map(visible(l), l.side, l.side, -5.0, 0.0, true), 0.0, tokens, 0.0, tokens};
      made.sheet.panels.push_back(p);
    }
    return made;
  }

  Figure curves_of_layers(const std::string& name, const std::string& title, const std::string& x_label,
                          Curve LayerSummary::*curve, const std::string& caption) const {
    Figure made = figure(name, fmt::format("{}: {}", s_.model, title), caption, {760, 420});
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
    made.sheet.panels.push_back(p);
    return made;
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
    Figure made =
        figure("retained", fmt::format("{}: what sink tokens and a window keep", s_.model),
               "Share of the attention on the first n and the last w tokens, mean over layers, heads and the "
               "queries from which "
               "this hides something. Band: from the weakest to the strongest layer, with 4 sink tokens.",
               {700, 420});
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
      // Lines that lie on one another: the lower ones are wider.
      Line line{sink_name(n), {},  series_colour(n), std::max(1.2, 4.4 - 0.8 * static_cast<double>(n)),
                "",           true};
      for (std::size_t w = 0; w < s_.windows.size(); ++w) {
        if (hides(n, w)) line.points.emplace_back(static_cast<double>(s_.windows[w]), model_retained(n, w));
      }
      p.lines.push_back(line);
    }
    if (!advice_.grid.empty())
      p.marks.push_back({advice_.target, fmt::format("target {}", percent(advice_.target)), false});
    made.sheet.panels.push_back(p);
    return made;
  }

  Figure budget() const {
    Figure made = figure(
        "budget", fmt::format("{}: keys that hold the attention, by layer", s_.model),
        "Smallest number of keys that hold 90, 95 and 99 % of the mass, mean over heads and queries (solid), "
        "and for the "
        "mean over the query heads that share a key head (dashed): what a kernel that selects keys per key "
        "head would need.",
        {700, 400});
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
    made.sheet.panels.push_back(p);
    return made;
  }

  Figure by_query() const {
    Figure made = figure(
        "along_the_text", fmt::format("{}: along the text", s_.model),
        "Mean over heads by position of the query, one line per layer from dark (first) to light (last); "
        "black: all layers.",
        {520, 360, 2});
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
      made.sheet.panels.push_back(p);
    };
    panel(s_.sink_counts.size() > 1 ? "mass of the first 4 tokens" : "mass of the first token", "mass",
          Scale::linear, &LayerSummary::sink4_by_query);
    panel("keys for 95 % of the mass", "keys", Scale::log10, &LayerSummary::budget95_by_query);
    return made;
  }

  Figure sink_rate() const {
    Figure made = figure(
        "sink_rate", fmt::format("{}: sink rate of the first keys", s_.model),
        fmt::format(
            "Share of all layers and heads whose mean weight on the key, over the queries that see it, "
            "exceeds "
            "{:.1f} "
            "(arXiv 2410.10781). T: number of queries; the rate depends on it and is published for T = 64.",
            kSinkThreshold),
        {620, 340});
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
    made.sheet.panels.push_back(p);
    return made;
  }

  Figure pareto() const {
    Figure made = figure(
        "advice", fmt::format("{}: sink tokens and window for a share of the attention", s_.model),
        "Every dot is a pair of sink tokens and window; the line joins those that no cheaper pair beats. "
        "Right: how much "
        "the attention output of a layer changes (relative, mean over layers; each layer is fed what the "
        "whole model feeds "
        "it).",
        {540, 400, 2});
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
    left.lines.insert(left.lines.begin(), best);  // below the dots
    left.marks.push_back({advice_.target, fmt::format("target {}", percent(advice_.target)), false});
    for (const Choice& c : advice_.chosen) {
      const auto cost = static_cast<double>(c.pair.sink_tokens + c.pair.window);
      const Mark mark{cost, fmt::format("{} + {}", c.pair.sink_tokens, c.pair.window), true};
      left.marks.push_back(mark);
      right.marks.push_back(mark);
    }
    made.sheet.panels = {left, right};
    return made;
  }

  Figure measured() const {
    Figure made = figure(
        "measured", fmt::format("{}: predicted and measured", s_.model),
        "Horizontal: share of the attention that the pair loses, mean over layers and heads (predicted by "
        "the probe). "
        "Vertical: mean NLL measured with the pair on the same text, above that of reading all of it.",
        {620, 380});
    Panel p;
    p.x_label = "lost share of the attention (predicted)";
    p.y_label = "added mean NLL, in nats (measured)";
    double whole = 0.0;
    for (const Measured& m : advice_.measured) {
      if (m.pair.window == 0) whole = m.mean_nll;
    }
    std::size_t colour = 0;
    for (const Measured& m : advice_.measured) {
      const Choice* const predicted = prediction(m.pair);
      if (predicted == nullptr) continue;
      p.lines.push_back({fmt::format("{} + {}", m.pair.sink_tokens, m.pair.window),
                         {{1.0 - predicted->retained, m.mean_nll - whole}},
                         series_colour(colour++),
                         3.0,
                         "",
                         true,
                         true});
    }
    p.x_low = 0.0;
    made.sheet.panels.push_back(p);
    return made;
  }

  // Layers from the first to the last; of a model with windows in some, up to a third of them see all keys.
  std::vector<std::size_t> shown_layers(std::size_t most) const {
    std::vector<std::size_t> full, other;
    for (std::size_t i = 0; i < s_.layers.size(); ++i) (s_.layers[i].window > 0 ? other : full).push_back(i);
    const auto spread = [](const std::vector<std::size_t>& all, std::size_t count) {
      std::vector<std::size_t> some;
      for (std::size_t i = 0; i < std::min(count, all.size()); ++i) {
        some.push_back(all.size() <= count ? all[i]
                       : count == 1        ? all[0]
                                           : all[i * (all.size() - 1) / (count - 1)]);
      }
      return some;
    };
    std::vector<std::size_t> shown =
        spread(full, other.empty() ? most : std::max(most / 3, most - std::min(most, other.size())));
    const std::vector<std::size_t> rest = spread(other, most - shown.size());
    shown.insert(shown.end(), rest.begin(), rest.end());
    std::sort(shown.begin(), shown.end());
    return shown;
  }

  // The map without cells that no query of their row sees: above the diagonal, and behind the layer's window.
  std::vector<float> visible(const LayerSummary& l) const {
    std::vector<float> map = l.map;
    for (std::int64_t i = 0; i < l.side; ++i) {
      const std::int64_t first_query = i * s_.tokens / l.side;
      for (std::int64_t j = 0; j < l.side; ++j) {
        const std::int64_t first_key = j * s_.tokens / l.side, end = (j + 1) * s_.tokens / l.side;
        const bool behind = l.window > 0 && first_key >= l.sink_tokens && end <= first_query - l.window + 1;
        if (j > i || behind) map[static_cast<std::size_t>(i * l.side + j)] = std::nanf("");
      }
    }
    return map;
  }
};

}  // namespace

std::vector<Figure> model_figures(const ModelSummary& summary, const Advice& advice) {
  return ModelFigures(summary, advice).all();
}

}  // namespace basin::probe
