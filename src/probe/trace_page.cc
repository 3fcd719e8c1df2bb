// The page of a study's report: what report.html is given to show.
#include "probe/trace_view.h"

namespace basin::probe {
namespace {

constexpr double kMapLow = -3.0, kMapHigh = 0.0;  // log10 of the share of selected keys
constexpr std::int64_t kPageBytes = 2'600'000;    // of all maps of the page before packing

class TracePage : TraceView {
 public:
  using TraceView::TraceView;

  Json json(const std::vector<std::string>& lines) const {
    Json data;
    data["title"] = "What sparse attention selects";
    data["subtitle"] = fmt::format("{}, {} layers, top {}", source_, s_.layers.size(), s_.topk);
    data["lines"] = lines;
    Json names = Json::array();
    for (const LayerStudy& l : s_.layers) names.push_back(fmt::format("model's layer {}", l.number));
    data["layer_names"] = names;
    Json maps = maps_json(
        {kMapLow,
         kMapHigh,
         "of the visible keys are selected (largest below the cell)",
         "selections",
         "Queries from left to right, keys from top to bottom. A horizontal line is a position that all "
         "select, a diagonal "
         "a distance.",
         {"query", s_.queries, s_.first},
         {"key", s_.keys, 0}});
    maps["causal"] = "down";
    maps["tone"] = "linear";
    const auto side =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(std::sqrt(static_cast<double>(kPageBytes) /
                                                                     static_cast<double>(s_.layers.size()))),
                                 64, 512);
    const std::int64_t width = std::min(side, s_.map_rows), height = std::min(side, s_.map_columns);
    for (const LayerStudy& l : s_.layers) {
      maps["layers"].push_back({packed_map(turned(l, height, width), width, kMapLow, kMapHigh)});
    }
    data["maps"] = maps;
    data["grid"] = grid();
    data["grid_title"] = "Layers against layers";
    data["grid_columns"] = "layers";
    data["curves"] = curves();
    data["overall"] = overall();
    return data;
  }

 private:
  // Layers against layers.
  Json grid() const {
    Json all = Json::array();
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
      all.push_back(grid);
    }
    return all;
  }

  // One chart each, for the layer that is chosen.
  Json curves() const {
    Json curves = Json::array();
    const auto add = [&](const std::string& title, const std::string& help, const std::string& x, bool xlog,
                         const auto& of) {
      Json curve;
      curve["title"] = title;
      curve["help"] = help;
      curve["xlabel"] = x;
      curve["xlog"] = xlog;
      curve["layers"] = Json::array();
      for (const LayerStudy& l : s_.layers) curve["layers"].push_back(of(l));
      curves.push_back(curve);
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
    if (has_mass()) {
      add("Attention that the selections hold",
          "Share of the attention over all keys, mean over heads, against the position of the query.",
          "position of the query", false, [&](const LayerStudy& l) {
            return Json::array({series("held", thin(query_positions(), l.mass_by_query, false))});
          });
    }
    add("Share of absolute positions", "Of a selection, against the position of the query.",
        "position of the query", false, [&](const LayerStudy& l) {
          return Json::array({series("absolute", thin(query_positions(), l.absolute_by_query, false))});
        });
    return curves;
  }

  // Of all layers together.
  Json overall() const {
    Json overall = Json::array();
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
      overall.push_back(curve);
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
    if (has_mass()) {
      std::vector<float> mass;
      for (const LayerStudy& l : s_.layers) mass.push_back(l.mass);
      by_layer("Attention that the selections hold", {{"share of the attention over all keys", mass}}, true);
    }
    if (!inner.empty()) {
      const auto b = s_.layers[0].blocks.back().block;
      by_layer(fmt::format("Blocks of {}", b), {{"common", inner}, {"any", outer}}, false);
    }
    return overall;
  }
};

}  // namespace

Json trace_page(const Study& study, const Nulls& nulls, const std::string& source,
                const std::vector<std::string>& lines) {
  return TracePage(study, nulls, source).json(lines);
}

}  // namespace basin::probe
