// Charts as SVG: lines, bands and maps with axes, one or several panels on a sheet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace basin::probe {

enum class Scale { linear, log10, log2 };

struct Line {
  std::string label;                              // in the legend; empty = not there
  std::vector<std::pair<double, double>> points;  // those that are not finite break the line
  std::string colour;
  double width = 1.8;
  std::string dash;  // SVG's stroke-dasharray; empty = solid
  bool dots = false;
  bool label_at_end = false;  // beside the last point, instead of in the legend
};

struct Band {
  std::vector<double> x, low, high;
  std::string colour;
};

/// A picture in axes: row 0 is drawn at the top.
struct Image {
  std::string png;
  double x_low, x_high, y_top, y_bottom;
};

struct Mark {
  double at;
  std::string label;
  bool vertical = true;
};

struct Panel {
  std::string title, x_label, y_label;
  Scale x_scale = Scale::linear, y_scale = Scale::linear;
  std::optional<double> x_low, x_high, y_low, y_high;  // absent = from the data
  std::vector<Band> bands;
  std::vector<Line> lines;
  std::vector<Mark> marks;
  std::optional<Image> image;
  bool legend = true;
  /// Labels of a colour bar at the right, from its bottom to its top; empty = none.
  std::vector<std::string> colour_bar;
  std::string colour_label;
};

/// Panels row by row, all of one size.
struct Sheet {
  std::string title, caption;  // the caption is wrapped below
  int columns = 1;
  double panel_width = 620, panel_height = 360;
  std::vector<Panel> panels;
};

std::string svg(const Sheet& sheet);

/// 10 to a whole power, with raised digits.
std::string power_of_ten(int exponent);

/// Colours that stay apart for the colour-blind, and steps of one hue from light to dark for ordered series.
std::string series_colour(std::size_t index);
std::string ordered_colour(std::size_t index, std::size_t count);

}  // namespace basin::probe
