// The figures of a study's report.
#include <functional>

#include "probe/trace_view.h"

namespace basin::probe {
namespace {

class TraceFigures : TraceView {
 public:
  using TraceView::TraceView;

  std::vector<Figure> all() const {
    std::vector<Figure> figures = {maps(), lags(), ages(), frequencies(), absolute()};
    if (!s_.layers[0].blocks.empty()) {
      figures.push_back(by_position());
      figures.push_back(by_size());
    }
    if (has_mass()) figures.push_back(held());
    if (!s_.layers[0].multiplicity.empty()) figures.push_back(multiplicity());
    if (s_.layers.size() > 1) figures.push_back(between());
    return figures;
  }

 private:
  Figure maps() const {
    Figure made = figure(
        "maps", fmt::format("{}: selected keys", source_),
        "Queries from left to right, keys from top to bottom; colour: share of the visible keys of a cell "
        "that are selected, in steps of its square root, "
        "the largest where cells are joined: a single key among a cell's stays a line. Horizontal lines are "
        "absolute "
        "positions, "
        "diagonals distances.",
        {440, 368, 3});
    const auto count = std::min<std::size_t>(s_.layers.size(), 9);
    // No more than a panel has pixels: a picture that is scaled down loses lines.
    const std::int64_t width = std::min<std::int64_t>(256, s_.map_rows),
                       height = std::min<std::int64_t>(256, s_.map_columns);
    for (std::size_t i = 0; i < count; ++i) {
      const LayerStudy& l = s_.layers[count == 1 ? 0 : i * (s_.layers.size() - 1) / (count - 1)];
      Panel p;
      p.title = fmt::format("layer {}", l.number);
      p.x_label = "query";
      p.y_label = "key";
      p.colour_bar = {"0", "0.06", "0.25", "0.56", "1"};
      std::vector<float> map = turned(l, height, width);
      for (float& share : map) share = std::sqrt(share);
      for (std::int64_t k = 0; k < height; ++k) {  // nothing can be selected below the diagonal
        for (std::int64_t q = 0; q < width; ++q) {
          if (k * s_.keys / height >= s_.first + (q + 1) * s_.queries / width) {
            map[static_cast<std::size_t>(k * width + q)] = std::nanf("");
          }
        }
      }
      p.image = Image{coloured_map(map, width, height, 0.0, 1.0, false), static_cast<double>(s_.first),
                      static_cast<double>(s_.first + s_.queries), 0.0, static_cast<double>(s_.keys)};
      made.sheet.panels.push_back(p);
    }
    return made;
  }

  Figure by_position() const {
    Figure made = figure("blocks_by_position",
                         fmt::format("{}: blocks of neighbouring queries, along the text", source_),
                         fmt::format("Solid: {}; dashed: {} with the largest blocks. Early positions overlap "
                                     "by necessity: with little "
                                     "more than {} keys "
                                     "to choose from, every selection is nearly all of them.",
                                     rest_name(), first_name(), s_.topk),
                         {520, 380, 2});
    Panel inner, outer;
    inner.title = "common to the whole block";
    outer.title = "selected by any of the block";
    for (Panel* p : {&inner, &outer}) {
      p->x_label = "position of the block's first query";
      p->y_label = "keys";
      p->y_low = 0.0;
    }
    const std::size_t count = s_.layers[0].blocks.size();
    for (std::size_t i = 0; i < count; i += 2) {
      const std::vector<double> x = doubles(s_.layers[0].blocks[i].position);
      const auto add = [&](Panel& p, const auto& values) {
        p.lines.push_back({fmt::format("blocks of {}", kBlocks[i]), thin(x, rest(values), false),
                           ordered_colour(i, count + 1), 1.8, "", false});
      };
      add(inner, [i](const LayerStudy& l) { return l.blocks[i].intersection; });
      add(outer, [i](const LayerStudy& l) { return l.blocks[i].united; });
    }
    if (several()) {
      const BlockCounts& c = s_.layers[0].blocks.back();
      inner.lines.push_back({fmt::format("{}, of {}", first_name(), c.block),
                             thin(doubles(c.position), c.intersection, false), series_colour(1), 1.6, "6 4",
                             false});
      outer.lines.push_back({fmt::format("{}, of {}", first_name(), c.block),
                             thin(doubles(c.position), c.united, false), series_colour(1), 1.6, "6 4",
                             false});
    }
    made.sheet.panels = {inner, outer};
    return made;
  }

  Figure by_size() const {
    Figure made = figure(
        "blocks_by_size", fmt::format("{}: common and joint keys against the block's size", source_),
        "Mean over blocks and layers, band: 10th to 90th percentile over blocks of the other layers. By "
        "chance: every query selects among its keys at random. RoPE only: every query selects the distances "
        "that " +
            rope_owner() + " rotary term favours, whatever the content.",
        {520, 380, 2});
    Panel inner, outer;
    inner.title = "common to the whole block";
    outer.title = "selected by any of the block";
    const auto fill = [&](Panel& p, std::vector<float> BlockCounts::*values,
                          const std::vector<double>& chance, const std::vector<double>& rope) {
      p.x_label = "queries in the block";
      p.y_label = "keys";
      p.x_scale = Scale::log2;
      p.y_low = 0.0;
      Line zero{first_name(), {}, series_colour(1), 2.0, "", true},
          others{rest_name(), {}, series_colour(0), 2.4, "", true};
      Line by_chance{"by chance", {}, "#777777", 1.6, "2 4", false},
          by_rope{"RoPE only", {}, "#777777", 1.6, "8 4", false};
      Band band;
      band.colour = series_colour(0);
      for (std::size_t i = 0; i < s_.layers[0].blocks.size(); ++i) {
        const auto x = static_cast<double>(kBlocks[i]);
        zero.points.emplace_back(x, mean(s_.layers[0].blocks[i].*values));
        std::vector<float> all;
        for (std::size_t l = several() ? 1 : 0; l < s_.layers.size(); ++l) {
          const std::vector<float>& of_layer = s_.layers[l].blocks[i].*values;
          all.insert(all.end(), of_layer.begin(), of_layer.end());
        }
        others.points.emplace_back(x, mean(all));
        band.x.push_back(x);
        band.low.push_back(quantile(all, 0.1));
        band.high.push_back(quantile(all, 0.9));
        by_chance.points.emplace_back(x, chance[i]);
        if (i < rope.size()) by_rope.points.emplace_back(x, rope[i]);
      }
      p.bands = {band};
      p.lines = {others};
      if (several()) p.lines.push_back(zero);
      p.lines.push_back(by_chance);
      if (!by_rope.points.empty()) p.lines.push_back(by_rope);
      p.marks.push_back({static_cast<double>(s_.topk), fmt::format("a selection: {}", s_.topk), false});
    };
    fill(inner, &BlockCounts::intersection, nulls_.random.intersection, nulls_.rope.intersection);
    fill(outer, &BlockCounts::united, nulls_.random.united, nulls_.rope.united);
    made.sheet.panels = {inner, outer};
    return made;
  }

  Figure two_lines(const std::string& name, const std::string& title, const std::string& caption,
                   const std::string& x_label, const std::string& y_label, Scale scale,
                   const std::vector<double>& x, bool largest, std::size_t most,
                   const std::function<std::vector<float>(const LayerStudy&)>& values) const {
    Figure made = figure(name, fmt::format("{}: {}", source_, title), caption, {820, 380});
    Panel p;
    p.x_label = x_label;
    p.y_label = y_label;
    p.x_scale = scale;
    p.y_low = 0.0;
    p.lines.push_back({rest_name(), thin(x, rest(values), largest, most), series_colour(0), 1.6, "", false});
    if (several()) {
      p.lines.push_back(
          {first_name(), thin(x, values(s_.layers[0]), largest, most), series_colour(1), 1.2, "", false});
    }
    made.sheet.panels = {p};
    return made;
  }

  Figure multiplicity() const {
    return two_lines("multiplicity", "keys that so many of 128 neighbouring queries select",
                     "At 1 the curve is the union, at 128 the intersection of a block. A plateau are keys "
                     "that all select; a "
                     "steep start are keys that few do.",
                     "selected by at least so many queries", "keys", Scale::linear,
                     count_up(kBlocks.back(), 1.0), false, 128,
                     [](const LayerStudy& l) { return l.multiplicity; });
  }

  Figure lags() const {
    Figure made = two_lines(
        "lags", "overlap of a query's selection with a later one",
        "Solid: the sets as they are, high when absolute positions are selected. Dashed: the earlier set "
        "moved along by the lag, high when distances are.",
        "lag, in tokens", "share in common", Scale::log2, doubles(s_.layers[0].lags), false, 64,
        [](const LayerStudy& l) { return l.overlap; });
    Panel& p = made.sheet.panels[0];
    p.y_high = 1.0;
    const std::vector<double> x = doubles(s_.layers[0].lags);
    p.lines.push_back({"moved along", thin(x, rest([](const LayerStudy& l) { return l.shifted; }), false),
                       series_colour(0), 1.6, "6 4", false});
    if (several())
      p.lines.push_back({"", thin(x, s_.layers[0].shifted, false), series_colour(1), 1.2, "6 4", false});
    return made;
  }

  Figure ages() const {
    const auto count = std::min<std::size_t>(s_.layers[0].age.size(), 257);
    Figure made = two_lines(
        "ages", "which distances are selected",
        "Share of the queries that select the key so many tokens back. Left: up to 256. Right: all, the "
        "largest of each bin. Dashed: the strongest distances of " +
            rope_owner() + " rotary term alone.",
        "age, in tokens", "share of queries", Scale::linear, count_up(count), true, 257,
        [count](const LayerStudy& l) {
          return std::vector<float>(l.age.begin(), l.age.begin() + static_cast<std::ptrdiff_t>(count));
        });
    for (const std::int64_t lag : rope_peaks(static_cast<std::int64_t>(count), 11, s_.rope)) {
      made.sheet.panels[0].marks.push_back({static_cast<double>(lag), "", true});
    }
    const Figure all =
        two_lines("", "", "", "age, in tokens", "share of queries", Scale::linear,
                  count_up(s_.layers[0].age.size()), true, 500, [](const LayerStudy& l) { return l.age; });
    made.sheet.panels.push_back(all.sheet.panels[0]);
    for (Panel& p : made.sheet.panels) p.y_high = 1.0;
    made.sheet.columns = 2;
    made.sheet.panel_width = 560;
    return made;
  }

  Figure frequencies() const {
    Figure made = two_lines(
        "positions", "which positions are selected",
        "Share of the queries that see a key and select it, the largest of each bin. Above the line it "
        "counts as absolute. Recent keys at the right end are seen by few queries.",
        "position of the key", "share of queries", Scale::linear, count_up(s_.layers[0].frequency.size()),
        true, 600, [](const LayerStudy& l) { return l.frequency; });
    made.sheet.panels[0].y_high = 1.0;
    made.sheet.panels[0].marks.push_back({kAbsoluteShare, fmt::format("{:.2f}", kAbsoluteShare), false});
    return made;
  }

  Figure held() const {
    Figure made =
        two_lines("attention_mass", "attention that the selections hold",
                  "Share of the attention over all keys that falls on the selected ones, mean over "
                  "heads, against the position of the query.",
                  "position of the query", "share of the attention", Scale::linear, query_positions(), false,
                  kPoints, [](const LayerStudy& l) { return l.mass_by_query; });
    made.sheet.panels[0].y_high = 1.0;
    return made;
  }

  Figure absolute() const {
    Figure made = figure(
        "absolute_and_relative", fmt::format("{}: absolute and relative selections", source_),
        "Left: share of a selection at absolute positions, along the text; the rest is relative. Middle: of "
        "the keys that a "
        "block of neighbouring queries selects together, those common to all (the sinks of the block) and "
        "those that differ "
        "(union minus intersection). Right: absolute positions in spans of 2048 queries, and the share of "
        "them that stays so "
        "in the next span.",
        {440, 360, 3});
    Panel share =
        two_lines("", "", "", "position of the query", "share of the selection", Scale::linear,
                  query_positions(), false, kPoints, [](const LayerStudy& l) { return l.absolute_by_query; })
            .sheet.panels[0];
    share.title = "absolute share";
    made.sheet.panels.push_back(share);
    if (!s_.layers[0].blocks.empty()) {
      Panel p;
      const BlockCounts& c = s_.layers[0].blocks.back();
      const std::vector<double> x = doubles(c.position);
      p.title = fmt::format("blocks of {}, {}", c.block, rest_name());
      p.x_label = "position of the block";
      p.y_label = "keys";
      p.y_low = 0.0;
      p.lines.push_back(
          {"intersection",
           thin(x, rest([](const LayerStudy& l) { return l.blocks.back().intersection; }), false),
           series_colour(2), 1.8, "", false});
      p.lines.push_back({"union minus intersection",
                         thin(x, rest([](const LayerStudy& l) {
                                std::vector<float> difference = l.blocks.back().united;
                                for (std::size_t i = 0; i < difference.size(); ++i) {
                                  difference[i] -= l.blocks.back().intersection[i];
                                }
                                return difference;
                              }),
                              false),
                         series_colour(3), 1.8, "", false});
      made.sheet.panels.push_back(p);
    }
    Panel spans;
    spans.title = "absolute positions by span";
    spans.x_label = "first query of the span";
    spans.y_label = "keys";
    spans.y_low = 0.0;
    const std::vector<double> x = doubles(s_.layers[0].span_position);
    const std::vector<float> keys = rest([](const LayerStudy& l) { return l.span_keys; });
    Line held{rest_name(), {}, series_colour(0), 1.8, "", true},
        stay{"of them stay in the next", {}, series_colour(4), 1.8, "5 4", true};
    std::vector<float> kept(keys.size(), 0.0f);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      double sum = 0.0, count = 0.0;
      for (std::size_t l = several() ? 1 : 0; l < s_.layers.size(); ++l) {
        if (!std::isfinite(s_.layers[l].span_stay[i])) continue;
        sum += static_cast<double>(s_.layers[l].span_stay[i] * s_.layers[l].span_keys[i]);
        count += 1.0;
      }
      held.points.emplace_back(x[i], static_cast<double>(keys[i]));
      if (count > 0.0) stay.points.emplace_back(x[i], sum / count);
    }
    spans.lines = {held, stay};
    made.sheet.panels.push_back(spans);
    return made;
  }

  Figure between() const {
    Figure made =
        figure("layers", fmt::format("{}: what layers have in common", source_),
               "Share of a query's selection that two layers have in common, mean over sampled queries.",
               {560, 500});
    Panel p;
    p.x_label = p.y_label = "layer";
    p.colour_bar = {"0", "0.25", "0.5", "0.75", "1"};
    const auto layers = static_cast<std::int64_t>(s_.layers.size());
    p.image = Image{coloured_map(s_.between, layers, layers, 0.0, 1.0, false), -0.5,
                    static_cast<double>(layers) - 0.5, -0.5, static_cast<double>(layers) - 0.5};
    made.sheet.panels = {p};
    return made;
  }
};

}  // namespace

std::vector<Figure> trace_figures(const Study& study, const Nulls& nulls, const std::string& source) {
  return TraceFigures(study, nulls, source).all();
}

}  // namespace basin::probe
