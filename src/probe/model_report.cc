// The report of a probed model: its words, its summary in numbers, and its files.
#include "probe/model_view.h"

namespace basin::probe {
namespace {

class ModelWords : ModelView {
 public:
  using ModelView::ModelView;

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
      const Choice* const predicted = prediction(m.pair);
      lines.push_back(fmt::format(
          "Measured perplexity, {}: {:.3f} (mean NLL {:.4f}){}.", m.name, m.perplexity, m.mean_nll,
          predicted == nullptr
              ? std::string()
              : fmt::format("; predicted: keeps {} of the attention", percent(predicted->retained))));
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
      Json row = {{"name", m.name},
                  {"sink_tokens", m.pair.sink_tokens},
                  {"window", m.pair.window},
                  {"mean_nll", m.mean_nll},
                  {"perplexity", m.perplexity}};
      if (const Choice* const predicted = prediction(m.pair)) {
        row["retained"] = rounded(predicted->retained);
        row["output_error"] = rounded(predicted->output_error);
      }
      advice["measured"].push_back(row);
    }
    out["advice"] = advice;
    return out;
  }

 private:
  static Json tables(const std::vector<std::vector<float>>& rows) {
    Json out = Json::array();
    for (const auto& row : rows) out.push_back(numbers(row));
    return out;
  }
};

}  // namespace

Written write_model_report(const std::filesystem::path& folder, const ModelSummary& summary,
                           const Advice& advice, const std::vector<std::string>& labels, ThreadPool& pool) {
  const ModelWords words(summary, advice);
  const std::vector<std::string> lines = words.sentences();
  const std::string no_pictures = write_figures(folder, model_figures(summary, advice), pool);
  write_text(folder / "report.html", page(model_page(summary, advice, lines, labels, pool)));
  write_text(folder / "summary.json", words.summary_json().dump(1) + "\n");
  std::string text;
  for (const std::string& line : lines) text += line + "\n\n";
  write_text(folder / "summary.txt", text);
  return {lines, no_pictures};
}

}  // namespace basin::probe
