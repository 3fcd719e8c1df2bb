// The report of a study of selections.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "basin/base/error.h"
#include "probe/npz.h"
#include "probe/report.h"

namespace basin::probe {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMapLow = -3.0, kMapHigh = 0.0;  // log10 of the share of selected keys
constexpr std::int64_t kPageBytes = 2'600'000;    // of all maps of the page before packing
constexpr std::int64_t kMostRopeKeys = 16'384;    // the RoPE null model takes time in the square of it
constexpr std::size_t kPoints = 220;              // of a curve

double mean(const std::vector<float>& values) {
  return values.empty()
             ? std::nan("")
             : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double quantile(std::vector<float> values, double share) {
  if (values.empty()) return std::nan("");
  const auto at = static_cast<std::ptrdiff_t>(std::llround(share * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return static_cast<double>(values[static_cast<std::size_t>(at)]);
}

// At most kPoints points: means, or the largest values so that single peaks stay.
Curve thin(const std::vector<double>& x, const std::vector<float>& y, bool largest,
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

std::vector<double> count_up(std::size_t count, double first = 0.0) {
  std::vector<double> x(count);
  std::iota(x.begin(), x.end(), first);
  return x;
}

// Fewer cells, each the largest of those below it: a line of one pixel stays one.
std::vector<float> shrink(const std::vector<float>& map, std::int64_t rows, std::int64_t columns,
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

class TraceReport {
 public:
  TraceReport(const Study& study, const Nulls& nulls, const std::string& source)
      : s_(study), nulls_(nulls), source_(source) {}

  std::vector<std::string> sentences() const {
    std::vector<std::string> lines;
    lines.push_back(
        fmt::format("{}: {} layers, {} keys selected per query, studied are the queries at positions {} to "
                    "{}. Every row was checked: "
                    "in range, causal, without duplicates, of full size.",
                    source_, s_.layers.size(), s_.topk, s_.first, s_.first + s_.queries - 1));
    const auto block = [&](std::size_t i) {
      const double k = static_cast<double>(s_.topk);
      const double inner = over_layers([i](const LayerStudy& l) { return mean(l.blocks[i].intersection); });
      const double outer = over_layers([i](const LayerStudy& l) { return mean(l.blocks[i].united); });
      std::string line = fmt::format(
          "In blocks of {} neighbouring queries, {:.0f} keys ({:.1f} % of a selection) are common to all and "
          "{:.0f} are "
          "selected by any",
          kBlocks[i], inner, 100.0 * inner / k, outer);
      line += fmt::format("; by chance it would be {:.0f} and {:.0f}", nulls_.random.intersection[i],
                          nulls_.random.united[i]);
      if (i < nulls_.rope.intersection.size()) {
        line += fmt::format(", by the positions' RoPE alone {:.0f} and {:.0f}", nulls_.rope.intersection[i],
                            nulls_.rope.united[i]);
      }
      line += fmt::format(
          ". Reading the union once instead of every selection saves a factor of {:.1f}, at {:.1f} times the "
          "arithmetic.",
          static_cast<double>(kBlocks[i]) * k / outer, outer / k);
      lines.push_back(line);
    };
    const std::size_t blocks = s_.layers[0].blocks.size();
    if (blocks > 0) block(0);
    if (blocks > 1) block(blocks - 1);
    if (!s_.layers[0].multiplicity.empty()) {
      lines.push_back(fmt::format("Two queries of a block of 128 share {} of their selection on average.",
                                  percent(over_layers([](const LayerStudy& l) { return l.pairwise_128; }))));
    }
    lines.push_back(
        fmt::format("The first token is in {} of the selections, the first 4 are in {}, the first 64 in {} "
                    "(mean over layers).",
                    percent(over_layers([](const LayerStudy& l) { return l.sink_kept[0]; })),
                    percent(over_layers([](const LayerStudy& l) { return l.sink_kept[1]; })),
                    percent(over_layers([](const LayerStudy& l) { return l.sink_kept[3]; }))));
    lines.push_back(fmt::format(
        "{} of a selection are absolute positions, which at least {:.0f} % of the queries that see them "
        "select ({:.0f} "
        "keys, mean over layers); the rest moves with the query or with what it looks for.",
        percent(over_layers([](const LayerStudy& l) { return l.absolute_share; })), 100.0 * kAbsoluteShare,
        over_layers([](const LayerStudy& l) { return static_cast<double>(l.absolute_keys); })));
    if (s_.layers[0].span_keys.size() > 1) {
      std::vector<float> stay;
      for (const LayerStudy& l : s_.layers) {
        for (const float v : l.span_stay) {
          if (std::isfinite(v)) stay.push_back(v);
        }
      }
      if (!stay.empty()) {
        lines.push_back(
            fmt::format("From one span of 2048 queries to the next, {} of the absolute positions stay.",
                        percent(mean(stay))));
      }
    }
    if (s_.layers.size() > 1) {
      const LayerStudy& zero = s_.layers[0];
      std::string line = fmt::format("Layer {} stands apart in all curves", zero.number);
      if (!zero.blocks.empty()) {
        line +=
            fmt::format(": {:.0f} keys are common to its blocks of {}, against {:.0f} in the others",
                        mean(zero.blocks.back().intersection), zero.blocks.back().block, rest_block().first);
      }
      lines.push_back(line + ".");
    }
    return lines;
  }

  std::vector<Figure> figures() const {
    std::vector<Figure> all = {maps(), lags(), ages(), frequencies(), absolute()};
    if (!s_.layers[0].blocks.empty()) {
      all.push_back(by_position());
      all.push_back(by_size());
    }
    if (!s_.layers[0].multiplicity.empty()) all.push_back(multiplicity());
    if (s_.layers.size() > 1) all.push_back(between());
    return all;
  }

  std::string csv() const {
    std::string out =
        "layer,block,blocks,intersection_mean,intersection_p10,intersection_p90,union_mean,union_p10,union_"
        "p90,"
        "first_1_kept,first_4_kept,first_16_kept,first_64_kept,overlap_next_query,absolute_share,absolute_"
        "keys\n";
    for (const LayerStudy& l : s_.layers) {
      for (const BlockCounts& c : l.blocks) {
        out += fmt::format(
            "{},{},{},{:.2f},{:.0f},{:.0f},{:.2f},{:.0f},{:.0f},{:.4f},{:.4f},{:.4f},{:.4f},{:.4f},{:.4f},{}"
            "\n",
            l.number, c.block, c.position.size(), mean(c.intersection), quantile(c.intersection, 0.1),
            quantile(c.intersection, 0.9), mean(c.united), quantile(c.united, 0.1), quantile(c.united, 0.9),
            l.sink_kept[0], l.sink_kept[1], l.sink_kept[2], l.sink_kept[3],
            l.overlap.empty() ? 0.0f : l.overlap[0], l.absolute_share, l.absolute_keys);
      }
    }
    return out;
  }

  Json summary_json() const {
    Json out;
    out["schema"] = "basin.probe.trace/1";
    out["source"] = source_;
    out["topk"] = s_.topk;
    out["first_position"] = s_.first;
    out["queries"] = s_.queries;
    out["blocks"] = Json::array();
    for (std::size_t i = 0; i < s_.layers[0].blocks.size(); ++i) out["blocks"].push_back(kBlocks[i]);
    const auto nulls = [](const NullCounts& n) {
      Json j;
      j["intersection"] = Json::array();
      j["union"] = Json::array();
      for (const double v : n.intersection) j["intersection"].push_back(rounded(v));
      for (const double v : n.united) j["union"].push_back(rounded(v));
      return j;
    };
    out["random"] = nulls(nulls_.random);
    if (!nulls_.rope.intersection.empty()) out["rope_only"] = nulls(nulls_.rope);
    out["layers"] = Json::array();
    for (const LayerStudy& l : s_.layers) {
      Json layer;
      layer["layer"] = l.number;
      layer["intersection"] = Json::array();
      layer["union"] = Json::array();
      for (const BlockCounts& c : l.blocks) {
        layer["intersection"].push_back(rounded(mean(c.intersection)));
        layer["union"].push_back(rounded(mean(c.united)));
      }
      layer["pairwise_overlap_128"] = rounded(static_cast<double>(l.pairwise_128));
      layer["lags"] = l.lags;
      layer["overlap"] = numbers(l.overlap);
      layer["overlap_shifted"] = numbers(l.shifted);
      layer["sink_kept_1_4_16_64"] = numbers({l.sink_kept.begin(), l.sink_kept.end()});
      layer["absolute_share"] = rounded(static_cast<double>(l.absolute_share));
      layer["absolute_keys"] = l.absolute_keys;
      layer["span_position"] = l.span_position;
      layer["span_keys"] = numbers(l.span_keys);
      layer["span_stay"] = numbers(l.span_stay);
      out["layers"].push_back(layer);
    }
    return out;
  }

  Json page_json(const std::vector<std::string>& lines) const {
    Json data;
    data["title"] = "What sparse attention selects";
    data["subtitle"] = fmt::format("{}, {} layers, top {}", source_, s_.layers.size(), s_.topk);
    data["lines"] = lines;
    Json names = Json::array();
    for (const LayerStudy& l : s_.layers) names.push_back(fmt::format("model's layer {}", l.number));
    data["layer_names"] = names;
    Json maps;
    maps["low"] = kMapLow;
    maps["high"] = kMapHigh;
    maps["unit"] = "of the visible keys are selected (largest below the cell)";
    maps["mean"] = "selections";
    maps["help"] =
        "Queries from left to right, keys from top to bottom. A horizontal line is a position that all "
        "select, a diagonal "
        "a distance.";
    maps["x_name"] = "query";
    maps["y_name"] = "key";
    maps["x_tokens"] = s_.queries;
    maps["y_tokens"] = s_.keys;
    maps["x_first"] = s_.first;
    maps["y_first"] = 0;
    maps["causal"] = "down";
    maps["tone"] = "linear";
    maps["layers"] = Json::array();
    const auto side =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(std::sqrt(static_cast<double>(kPageBytes) /
                                                                     static_cast<double>(s_.layers.size()))),
                                 64, 512);
    const std::int64_t width = std::min(side, s_.map_rows), height = std::min(side, s_.map_columns);
    for (const LayerStudy& l : s_.layers) {
      maps["layers"].push_back({packed_map(turned(l, height, width), width, kMapLow, kMapHigh)});
    }
    data["maps"] = maps;
    data["grid"] = Json::array();
    data["grid_title"] = "Layers against layers";
    data["grid_columns"] = "layers";
    if (s_.layers.size() > 1) {
      Json grid;
      grid["name"] = "overlap with layer";
      grid["help"] = "share of a query's selection that two layers have in common";
      grid["low"] = 0;
      grid["high"] = 1;
      grid["values"] = Json::array();
      for (std::size_t a = 0; a < s_.layers.size(); ++a) {
        Json row = Json::array();
        for (std::size_t b = 0; b < s_.layers.size(); ++b) {
          row.push_back(rounded(static_cast<double>(s_.between[a * s_.layers.size() + b])));
        }
        grid["values"].push_back(row);
      }
      data["grid"].push_back(grid);
    }

    data["curves"] = Json::array();
    const auto add = [&](const std::string& title, const std::string& help, const std::string& x, bool xlog,
                         const auto& of) {
      Json curve;
      curve["title"] = title;
      curve["help"] = help;
      curve["xlabel"] = x;
      curve["xlog"] = xlog;
      curve["layers"] = Json::array();
      for (const LayerStudy& l : s_.layers) curve["layers"].push_back(of(l));
      data["curves"].push_back(curve);
    };
    const auto series = [](const std::string& name, const Curve& curve) {
      Json one;
      one["name"] = name;
      one["x"] = Json::array();
      one["y"] = Json::array();
      for (const auto& [x, y] : curve) {
        one["x"].push_back(rounded(x));
        one["y"].push_back(rounded(y));
      }
      return one;
    };
    if (!s_.layers[0].blocks.empty()) {
      add("Common to a block, and selected by any",
          "Against the position of the block, for the largest blocks.", "position of the block", false,
          [&](const LayerStudy& l) {
            Json out = Json::array();
            const BlockCounts& c = l.blocks.back();
            out.push_back(series(fmt::format("common to {}", c.block),
                                 thin(doubles(c.position), c.intersection, false)));
            out.push_back(
                series(fmt::format("any of {}", c.block), thin(doubles(c.position), c.united, false)));
            return out;
          });
      add("Against the block's size", "Mean over blocks; dashed lines in the figures are the null models.",
          "queries in the block", true, [&](const LayerStudy& l) {
            Curve inner, outer, chance, rope;
            for (std::size_t i = 0; i < l.blocks.size(); ++i) {
              const auto x = static_cast<double>(l.blocks[i].block);
              inner.emplace_back(x, mean(l.blocks[i].intersection));
              outer.emplace_back(x, mean(l.blocks[i].united));
              chance.emplace_back(x, nulls_.random.intersection[i]);
              if (i < nulls_.rope.intersection.size()) rope.emplace_back(x, nulls_.rope.intersection[i]);
            }
            Json out = {series("common", inner), series("any", outer), series("common, by chance", chance)};
            if (!rope.empty()) out.push_back(series("common, RoPE only", rope));
            return out;
          });
    }
    add("Overlap against lag",
        "Share of a selection that the query so many tokens later has too; shifted: moved along by the lag.",
        "lag", true, [&](const LayerStudy& l) {
          Json out = {series("as it is", thin(doubles(l.lags), l.overlap, false))};
          out.push_back(series("shifted", thin(doubles(l.lags), l.shifted, false)));
          return out;
        });
    add("Ages up to 256", "Share of the queries that select the key so many tokens back.", "age, in tokens",
        false, [&](const LayerStudy& l) {
          const std::vector<float> young(
              l.age.begin(),
              l.age.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(257, l.age.size())));
          return Json::array({series("selected", thin(count_up(young.size()), young, true, 257))});
        });
    add("All ages", "The same, the largest of each bin.", "age, in tokens", false, [&](const LayerStudy& l) {
      return Json::array({series("selected", thin(count_up(l.age.size()), l.age, true, 400))});
    });
    add("Frequency of a position", "Share of the queries that select a key, the largest of each bin.",
        "position of the key", false, [&](const LayerStudy& l) {
          return Json::array(
              {series("selected", thin(count_up(l.frequency.size()), l.frequency, true, 400))});
        });
    if (!s_.layers[0].multiplicity.empty()) {
      add("Keys selected by at least so many of 128", "1 gives the union, 128 the intersection.", "queries",
          false, [&](const LayerStudy& l) {
            return Json::array(
                {series("keys", thin(count_up(l.multiplicity.size(), 1.0), l.multiplicity, false))});
          });
    }
    add("Share of absolute positions", "Of a selection, against the position of the query.",
        "position of the query", false, [&](const LayerStudy& l) {
          return Json::array({series("absolute", thin(query_positions(), l.absolute_by_query, false))});
        });

    data["overall"] = Json::array();
    const auto by_layer = [&](const std::string& title,
                              const std::vector<std::pair<std::string, std::vector<float>>>& all,
                              bool share) {
      Json curve;
      curve["title"] = title;
      curve["xlabel"] = "layer";
      curve["x"] = Json::array();
      for (const LayerStudy& l : s_.layers) curve["x"].push_back(l.number);
      if (share) {
        curve["ylow"] = 0;
        curve["yhigh"] = 1;
      }
      curve["series"] = Json::array();
      for (const auto& [name, values] : all)
        curve["series"].push_back({{"name", name}, {"y", numbers(values)}});
      data["overall"].push_back(curve);
    };
    std::vector<float> first, four, many, absolute_shares, inner, outer;
    for (const LayerStudy& l : s_.layers) {
      first.push_back(l.sink_kept[0]);
      four.push_back(l.sink_kept[1]);
      many.push_back(l.sink_kept[3]);
      absolute_shares.push_back(l.absolute_share);
      if (l.blocks.empty()) continue;
      inner.push_back(static_cast<float>(mean(l.blocks.back().intersection)));
      outer.push_back(static_cast<float>(mean(l.blocks.back().united)));
    }
    by_layer(
        "Sinks kept",
        {{"first token", first}, {"first 4", four}, {"first 64", many}, {"absolute share", absolute_shares}},
        true);
    if (!inner.empty()) {
      const auto b = s_.layers[0].blocks.back().block;
      by_layer(fmt::format("Blocks of {}", b), {{"common", inner}, {"any", outer}}, false);
    }
    return data;
  }

  void write_arrays(const std::filesystem::path& path) const {
    NpzWriter file(path);
    for (const LayerStudy& l : s_.layers) {
      const std::string prefix = fmt::format("layer_{:03}/", l.number);
      const auto add = [&](const std::string& name, const std::vector<float>& values) {
        const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
        file.add(prefix + name, shape, values);
      };
      for (const BlockCounts& c : l.blocks) {
        add(fmt::format("intersection_{}", c.block), c.intersection);
        add(fmt::format("union_{}", c.block), c.united);
        file.add(prefix + fmt::format("position_{}", c.block), c.position);
      }
      const std::int64_t shape[] = {s_.map_rows, s_.map_columns};
      file.add(prefix + "map", shape, l.map);
      add("frequency", l.frequency);
      add("age", l.age);
      add("multiplicity", l.multiplicity);
      add("overlap", l.overlap);
      add("overlap_shifted", l.shifted);
      file.add(prefix + "lags", l.lags);
      add("absolute_by_query", l.absolute_by_query);
      add("span_keys", l.span_keys);
      add("span_stay", l.span_stay);
    }
    const auto layers = static_cast<std::int64_t>(s_.layers.size());
    const std::int64_t shape[] = {layers, layers};
    file.add("between_layers", shape, s_.between);
    file.finish();
  }

 private:
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

  Figure maps() const {
    Figure figure{"maps", {}};
    figure.sheet.title = fmt::format("{}: selected keys", source_);
    figure.sheet.caption =
        "Queries from left to right, keys from top to bottom; colour: share of the visible keys of a cell "
        "that are selected, "
        "the largest where cells are joined, so that lines of one pixel stay. Horizontal lines are absolute "
        "positions, "
        "diagonals distances.";
    figure.sheet.columns = 3;
    figure.sheet.panel_width = 400;
    figure.sheet.panel_height = 380;
    const auto count = std::min<std::size_t>(s_.layers.size(), 9);
    const std::int64_t width = std::min<std::int64_t>(512, s_.map_rows),
                       height = std::min<std::int64_t>(512, s_.map_columns);
    for (std::size_t i = 0; i < count; ++i) {
      const LayerStudy& l = s_.layers[count == 1 ? 0 : i * (s_.layers.size() - 1) / (count - 1)];
      Panel p;
      p.title = fmt::format("layer {}", l.number);
      p.x_label = "query";
      p.y_label = "key";
      p.colour_bar = {"0", "0.25", "0.5", "0.75", "1"};
      std::vector<float> map = turned(l, height, width);
      for (std::int64_t k = 0; k < height; ++k) {  // nothing can be selected below the diagonal
        for (std::int64_t q = 0; q < width; ++q) {
          if (k * s_.keys / height > s_.first + (q + 1) * s_.queries / width) {
            map[static_cast<std::size_t>(k * width + q)] = std::nanf("");
          }
        }
      }
      p.image = Image{coloured_map(map, width, height, 0.0, 1.0, false), static_cast<double>(s_.first),
                      static_cast<double>(s_.first + s_.queries), 0.0, static_cast<double>(s_.keys)};
      figure.sheet.panels.push_back(p);
    }
    return figure;
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

  Figure by_position() const {
    Figure figure{"blocks_by_position", {}};
    figure.sheet.title = fmt::format("{}: blocks of neighbouring queries, along the text", source_);
    figure.sheet.caption = fmt::format(
        "Solid: {}; dashed: {} with the largest blocks. Early positions overlap by necessity: with little "
        "more than {} keys "
        "to choose from, every selection is nearly all of them.",
        rest_name(), first_name(), s_.topk);
    figure.sheet.columns = 2;
    figure.sheet.panel_width = 520;
    figure.sheet.panel_height = 380;
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
    figure.sheet.panels = {inner, outer};
    return figure;
  }

  Figure by_size() const {
    Figure figure{"blocks_by_size", {}};
    figure.sheet.title = fmt::format("{}: common and joint keys against the block's size", source_);
    figure.sheet.caption =
        "Mean over blocks and layers, band: 10th to 90th percentile over blocks of the other layers. By "
        "chance: every query "
        "selects among its keys at random. RoPE only: every query selects the distances that the rotary term "
        "of "
        "DeepSeek-V3.2 favours, whatever the content.";
    figure.sheet.columns = 2;
    figure.sheet.panel_width = 520;
    figure.sheet.panel_height = 380;
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
    figure.sheet.panels = {inner, outer};
    return figure;
  }

  Figure two_lines(const std::string& name, const std::string& title, const std::string& caption,
                   const std::string& x_label, const std::string& y_label, Scale scale,
                   const std::vector<double>& x, bool largest, std::size_t most,
                   const std::function<std::vector<float>(const LayerStudy&)>& values) const {
    Figure figure{name, {}};
    figure.sheet.title = fmt::format("{}: {}", source_, title);
    figure.sheet.caption = caption;
    figure.sheet.panel_width = 820;
    figure.sheet.panel_height = 380;
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
    figure.sheet.panels = {p};
    return figure;
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
    Figure figure = two_lines(
        "lags", "overlap of a query's selection with a later one",
        "Solid: the sets as they are, high when absolute positions are selected. Dashed: the earlier set "
        "moved along by the lag, high when distances are.",
        "lag, in tokens", "share in common", Scale::log2, doubles(s_.layers[0].lags), false, 64,
        [](const LayerStudy& l) { return l.overlap; });
    Panel& p = figure.sheet.panels[0];
    p.y_high = 1.0;
    const std::vector<double> x = doubles(s_.layers[0].lags);
    p.lines.push_back({"moved along", thin(x, rest([](const LayerStudy& l) { return l.shifted; }), false),
                       series_colour(0), 1.6, "6 4", false});
    if (several())
      p.lines.push_back({"", thin(x, s_.layers[0].shifted, false), series_colour(1), 1.2, "6 4", false});
    return figure;
  }

  Figure ages() const {
    const auto count = std::min<std::size_t>(s_.layers[0].age.size(), 257);
    Figure figure = two_lines(
        "ages", "which distances are selected",
        "Share of the queries that select the key so many tokens back. Left: up to 256. Right: all, the "
        "largest of each bin. Dashed: the strongest distances of the rotary term alone, for DeepSeek-V3.2.",
        "age, in tokens", "share of queries", Scale::linear, count_up(count), true, 257,
        [count](const LayerStudy& l) {
          return std::vector<float>(l.age.begin(), l.age.begin() + static_cast<std::ptrdiff_t>(count));
        });
    for (const double lag : {6.0, 12.0, 18.0, 25.0, 32.0, 44.0, 57.0, 76.0, 101.0, 134.0, 177.0}) {
      figure.sheet.panels[0].marks.push_back({lag, "", true});
    }
    const Figure all =
        two_lines("", "", "", "age, in tokens", "share of queries", Scale::linear,
                  count_up(s_.layers[0].age.size()), true, 500, [](const LayerStudy& l) { return l.age; });
    figure.sheet.panels.push_back(all.sheet.panels[0]);
    for (Panel& p : figure.sheet.panels) p.y_high = 1.0;
    figure.sheet.columns = 2;
    figure.sheet.panel_width = 560;
    return figure;
  }

  Figure frequencies() const {
    Figure figure = two_lines(
        "positions", "which positions are selected",
        "Share of the queries that see a key and select it, the largest of each bin. Above the line it "
        "counts as absolute. Recent keys at the right end are seen by few queries.",
        "position of the key", "share of queries", Scale::linear, count_up(s_.layers[0].frequency.size()),
        true, 600, [](const LayerStudy& l) { return l.frequency; });
    figure.sheet.panels[0].y_high = 1.0;
    figure.sheet.panels[0].marks.push_back({kAbsoluteShare, fmt::format("{:.2f}", kAbsoluteShare), false});
    return figure;
  }

  Figure absolute() const {
    Figure figure{"absolute_and_relative", {}};
    figure.sheet.title = fmt::format("{}: absolute and relative selections", source_);
    figure.sheet.caption =
        "Left: share of a selection at absolute positions, along the text; the rest is relative. Middle: of "
        "the keys that a "
        "block of neighbouring queries selects together, those common to all (the sinks of the block) and "
        "those that differ "
        "(union minus intersection). Right: absolute positions in spans of 2048 queries, and the share of "
        "them that stays so "
        "in the next span.";
    figure.sheet.columns = 3;
    figure.sheet.panel_width = 440;
    figure.sheet.panel_height = 360;
    Panel share =
        two_lines("", "", "", "position of the query", "share of the selection", Scale::linear,
                  query_positions(), false, kPoints, [](const LayerStudy& l) { return l.absolute_by_query; })
            .sheet.panels[0];
    share.title = "absolute share";
    figure.sheet.panels.push_back(share);
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
      figure.sheet.panels.push_back(p);
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
    figure.sheet.panels.push_back(spans);
    return figure;
  }

  Figure between() const {
    Figure figure{"layers", {}};
    figure.sheet.title = fmt::format("{}: what layers have in common", source_);
    figure.sheet.caption =
        "Share of a query's selection that two layers have in common, mean over sampled queries.";
    figure.sheet.panel_width = 560;
    figure.sheet.panel_height = 500;
    Panel p;
    p.x_label = p.y_label = "layer";
    p.colour_bar = {"0", "0.25", "0.5", "0.75", "1"};
    const auto layers = static_cast<std::int64_t>(s_.layers.size());
    p.image = Image{coloured_map(s_.between, layers, layers, 0.0, 1.0, false), -0.5,
                    static_cast<double>(layers) - 0.5, -0.5, static_cast<double>(layers) - 0.5};
    figure.sheet.panels = {p};
    return figure;
  }

  std::vector<double> query_positions() const {
    std::vector<double> x;
    for (std::int64_t row = 0; row < s_.map_rows; ++row) {
      x.push_back(static_cast<double>(s_.first + row * s_.row_queries) +
                  static_cast<double>(s_.row_queries) / 2.0);
    }
    return x;
  }
  static std::string percent(double share) {
    return share < 0.0995 || share > 0.9905 ? fmt::format("{:.1f} %", 100.0 * share)
                                            : fmt::format("{:.0f} %", 100.0 * share);
  }
  template <typename Value>
  double over_layers(const Value& value) const {
    double sum = 0.0;
    for (const LayerStudy& l : s_.layers) sum += static_cast<double>(value(l));
    return sum / static_cast<double>(s_.layers.size());
  }
  static Json numbers(const std::vector<float>& values) {
    Json out = Json::array();
    for (const float v : values) out.push_back(rounded(static_cast<double>(v)));
    return out;
  }

  const Study& s_;
  const Nulls& nulls_;
  const std::string& source_;
};

}  // namespace

Nulls null_models(const Study& s, ThreadPool& pool) {
  Nulls nulls;
  nulls.random = random_counts(s.first, s.queries, s.topk);
  if (s.keys > kMostRopeKeys) return nulls;
  StudyOptions options;
  options.first = s.first;
  const Study rope = study(make_trace({rope_selections(s.first, s.queries, s.topk)}, s.topk, s.first),
                           options, pool, {}, nullptr);
  for (const BlockCounts& c : rope.layers[0].blocks) {
    nulls.rope.intersection.push_back(mean(c.intersection));
    nulls.rope.united.push_back(mean(c.united));
  }
  return nulls;
}

std::vector<std::string> write_trace_report(const std::filesystem::path& folder, const Study& study,
                                            const Nulls& nulls, const std::string& source) {
  const TraceReport report(study, nulls, source);
  const std::vector<std::string> lines = report.sentences();
  write_figures(folder, report.figures());
  write_text(folder / "report.html", page(report.page_json(lines)));
  write_text(folder / "summary.json", report.summary_json().dump(1) + "\n");
  write_text(folder / "counts.csv", report.csv());
  std::string text;
  for (const std::string& line : lines) text += line + "\n\n";
  write_text(folder / "summary.txt", text);
  report.write_arrays(folder / "data.npz");
  return lines;
}

}  // namespace basin::probe
