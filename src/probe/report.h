// What every report of the probe consists of: one page, figures, a summary in words and one in numbers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "probe/chart.h"
#include "probe/study.h"
#include "probe/summary.h"

namespace basin::probe {

struct Figure {
  std::string name;  // of its files, without suffix
  Sheet sheet;
};

/// Sentences of a summary, and why there are no pictures but SVG; empty where there are.
struct Written {
  std::vector<std::string> lines;
  std::string no_pictures;
};

/// Writes `folder`/figures/NAME.svg, and NAME.png by rsvg-convert. Returns why a PNG is missing, or nothing.
std::string write_figures(const std::filesystem::path& folder, const std::vector<Figure>& figures,
                          ThreadPool& pool);

/// The whole page, which needs nothing but itself.
std::string page(const nlohmann::ordered_json& data);

/// Appears complete or not at all. Throws Error(io).
void write_text(const std::filesystem::path& path, std::string_view content);

/// A value with four significant digits; null when it is not finite.
nlohmann::ordered_json rounded(double value);

/// 8-bit grey levels of log10(value) between `low` and `high`, as a base64 PNG; 0 = 0 or below `low`.
std::string packed_map(const std::vector<float>& map, std::int64_t side, double low, double high);

/// An RGB picture of a map: log10 between `low` and `high`, or linear.
std::string coloured_map(const std::vector<float>& map, std::int64_t width, std::int64_t height, double low,
                         double high, bool logarithmic);

/// Writes report.html, summary.txt, summary.json and figures/ of a probed model. `labels`: the text of each token, may be
/// empty.
Written write_model_report(const std::filesystem::path& folder, const ModelSummary& summary,
                           const Advice& advice, const std::vector<std::string>& labels, ThreadPool& pool);

/// The null models that a study is held against; empty where they would take too long.
struct Nulls {
  NullCounts random;
  NullCounts rope;
};
Nulls null_models(const Study& study, ThreadPool& pool);

/// Writes report.html, summary.txt, summary.json, counts.csv, data.npz and figures/ of a study of selections. `source`:
/// what was read, for titles.
Written write_trace_report(const std::filesystem::path& folder, const Study& study, const Nulls& nulls,
                           const std::string& source, ThreadPool& pool);

}  // namespace basin::probe
