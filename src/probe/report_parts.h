// What both reports are made of: numbers in words and JSON, empty figures, and the description of the page's maps.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "probe/report.h"

namespace basin::probe {

using Json = nlohmann::ordered_json;

/// "7 %", with a decimal where that says more.
std::string percent(double share);

/// NaN of none.
double mean(const std::vector<float>& values);

Json numbers(const std::vector<float>& values);

/// Of a figure's panels, all alike.
struct PanelSize {
  double width, height;
  int columns = 1;
};

/// Without panels.
Figure figure(const std::string& name, const std::string& title, const std::string& caption,
              const PanelSize& size);

/// How the page reads its maps; the pictures come under "layers".
struct MapWords {
  double low, high;  // log10 of what the darkest and the lightest colour stand for
  std::string unit, mean, help;
  struct Side {
    std::string name;
    std::int64_t tokens, first;
  } x, y;
};
Json maps_json(const MapWords& words);

}  // namespace basin::probe
