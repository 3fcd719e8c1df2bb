#include "probe/report_parts.h"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

namespace basin::probe {

std::string percent(double share) {
  return share < 0.0995 || share > 0.9905 ? fmt::format("{:.1f} %", 100.0 * share)
                                          : fmt::format("{:.0f} %", 100.0 * share);
}

double mean(const std::vector<float>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return values.empty() ? std::nan("") : sum / static_cast<double>(values.size());
}

Json numbers(const std::vector<float>& values) {
  Json out = Json::array();
  for (const float v : values) out.push_back(rounded(static_cast<double>(v)));
  return out;
}

Figure figure(const std::string& name, const std::string& title, const std::string& caption,
              const PanelSize& size) {
  Figure figure{name, {}};
  figure.sheet.title = title;
  figure.sheet.caption = caption;
  figure.sheet.columns = size.columns;
  figure.sheet.panel_width = size.width;
  figure.sheet.panel_height = size.height;
  return figure;
}

Json maps_json(const MapWords& words) {
  Json maps;
  maps["low"] = words.low;
  maps["high"] = words.high;
  maps["unit"] = words.unit;
  maps["mean"] = words.mean;
  maps["help"] = words.help;
  maps["x_name"] = words.x.name;
  maps["y_name"] = words.y.name;
  maps["x_tokens"] = words.x.tokens;
  maps["y_tokens"] = words.y.tokens;
  maps["x_first"] = words.x.first;
  maps["y_first"] = words.y.first;
  maps["layers"] = Json::array();
  return maps;
}

}  // namespace basin::probe
