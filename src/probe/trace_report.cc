// The report of a study of selections: its words, its numbers in three forms, and its files.
#include "basin/base/error.h"
#include "probe/npz.h"
#include "probe/trace_view.h"

namespace basin::probe {
namespace {

constexpr std::int64_t kMostRopeKeys = 16'384;  // the RoPE null model takes time in the square of it

class TraceWords : TraceView {
 public:
  using TraceView::TraceView;

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
        line += fmt::format(", by {} RoPE alone {:.0f} and {:.0f}", rope_owner(), nulls_.rope.intersection[i],
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
    if (has_mass()) {
      const auto weakest =
          std::min_element(s_.layers.begin(), s_.layers.end(),
                           [](const LayerStudy& a, const LayerStudy& b) { return a.mass < b.mass; });
      lines.push_back(
          fmt::format("The selections hold {} of the attention over all keys (mean over heads and layers), "
                      "and least, {}, in layer {}.",
                      percent(over_layers([](const LayerStudy& l) { return l.mass; })),
                      percent(static_cast<double>(weakest->mass)), weakest->number));
    }
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
      std::string line = fmt::format("Layer {} is drawn apart in all curves", zero.number);
      if (!zero.blocks.empty()) {
        line +=
            fmt::format(": {:.0f} keys are common to its blocks of {}, against {:.0f} in the others",
                        mean(zero.blocks.back().intersection), zero.blocks.back().block, rest_block().first);
      }
      lines.push_back(line + ".");
    }
    return lines;
  }

  std::string csv() const {
    std::string out =
        "layer,block,blocks,intersection_mean,intersection_p10,intersection_p90,union_mean,union_p10,union_"
        "p90,"
        "first_1_kept,first_4_kept,first_16_kept,first_64_kept,overlap_next_query,absolute_share,absolute_"
        "keys,attention_mass\n";
    for (const LayerStudy& l : s_.layers) {
      for (const BlockCounts& c : l.blocks) {
        out += fmt::format(
            "{},{},{},{:.2f},{:.0f},{:.0f},{:.2f},{:.0f},{:.0f},{:.4f},{:.4f},{:.4f},{:.4f},{:.4f},{:.4f},{},"
            "{}"
            "\n",
            l.number, c.block, c.position.size(), mean(c.intersection), quantile(c.intersection, 0.1),
            quantile(c.intersection, 0.9), mean(c.united), quantile(c.united, 0.1), quantile(c.united, 0.9),
            l.sink_kept[0], l.sink_kept[1], l.sink_kept[2], l.sink_kept[3],
            l.overlap.empty() ? 0.0f : l.overlap[0], l.absolute_share, l.absolute_keys,
            l.mass_by_query.empty() ? std::string() : fmt::format("{:.4f}", l.mass));
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
    out["rope"] = s_.own_rope ? "the trace's" : "deepseek_v32";
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
      if (!l.mass_by_query.empty()) layer["attention_mass"] = rounded(static_cast<double>(l.mass));
      layer["absolute_share"] = rounded(static_cast<double>(l.absolute_share));
      layer["absolute_keys"] = l.absolute_keys;
      layer["span_position"] = l.span_position;
      layer["span_keys"] = numbers(l.span_keys);
      layer["span_stay"] = numbers(l.span_stay);
      out["layers"].push_back(layer);
    }
    return out;
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
      if (!l.mass_by_query.empty()) add("attention_mass_by_query", l.mass_by_query);
      add("span_keys", l.span_keys);
      add("span_stay", l.span_stay);
    }
    const auto layers = static_cast<std::int64_t>(s_.layers.size());
    const std::int64_t shape[] = {layers, layers};
    file.add("between_layers", shape, s_.between);
    file.finish();
  }
};

}  // namespace

Nulls null_models(const Study& s, ThreadPool& pool) {
  Nulls nulls;
  nulls.random = random_counts(s.first, s.queries, s.topk);
  if (s.keys > kMostRopeKeys) return nulls;
  StudyOptions options;
  options.first = s.first;
  const Study rope = study(make_trace({rope_selections(s.first, s.queries, s.topk, s.rope)}, s.topk, s.first),
                           options, pool, {}, nullptr);
  for (const BlockCounts& c : rope.layers[0].blocks) {
    nulls.rope.intersection.push_back(mean(c.intersection));
    nulls.rope.united.push_back(mean(c.united));
  }
  return nulls;
}

Written write_trace_report(const std::filesystem::path& folder, const Study& study, const Nulls& nulls,
                           const std::string& source, ThreadPool& pool) {
  const TraceWords words(study, nulls, source);
  const std::vector<std::string> lines = words.sentences();
  const std::string no_pictures = write_figures(folder, trace_figures(study, nulls, source), pool);
  write_text(folder / "report.html", page(trace_page(study, nulls, source, lines)));
  write_text(folder / "summary.json", words.summary_json().dump(1) + "\n");
  write_text(folder / "counts.csv", words.csv());
  std::string text;
  for (const std::string& line : lines) text += line + "\n\n";
  write_text(folder / "summary.txt", text);
  words.write_arrays(folder / "data.npz");
  return {lines, no_pictures};
}

}  // namespace basin::probe
