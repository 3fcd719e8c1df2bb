#include "probe/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "probe/png.h"

namespace basin::probe {
namespace {

constexpr double kLeft = 74, kRight = 18, kTop = 40, kBottom = 54, kBarWidth = 14, kBarRoom = 74;
constexpr double kTitle = 44, kCaptionLine = 17, kLegendLine = 18, kMargin = 10;
constexpr const char* kFont = "DejaVu Sans, Helvetica, Arial, sans-serif";
constexpr const char* kInk = "#222";
constexpr double kSmall = 11.5, kNormal = 12.5;

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string text(double x, double y, const std::string& content, double size, const char* anchor = "middle",
                 const std::string& more = {}) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" text-anchor=\"{}\" {}>{}</text>\n", x,
                     y, size, anchor, more, escape(content));
}

std::string number(double value) {
  value += 0.0;  // no -0
  const double size = std::abs(value);
  if (size >= 1e4 || (size > 0.0 && size < 1e-3)) {
    if (size >= 1e4 && size < 1e6 && std::fmod(size, 1000.0) == 0.0)
      return fmt::format("{:.0f}k", value / 1000.0);
    return fmt::format("{:.0e}", value);
  }
  return fmt::format("{:g}", std::round(value * 1e6) / 1e6 + 0.0);
}

// One axis: from data to pixels, and where its ticks stand.
class Axis {
 public:
  // `room_low`, `room_high`: share of the axis that stays free at its ends.
  Axis(Scale scale, double low, double high, double room_low, double room_high, double from, double to)
      : scale_(scale), from_(from), to_(to) {
    if (scale != Scale::linear) {
      low = std::max(low, 1e-12);
      high = std::max(high, low * 1.0001);
    }
    if (high <= low) {
      high = low + 1.0;
    }
    const double begin = forward(low), end = forward(high);
    low_ = begin - room_low * (end - begin);
    high_ = end + room_high * (end - begin);
  }

  double operator()(double value) const {
    return from_ + (forward(value) - low_) / (high_ - low_) * (to_ - from_);
  }
  bool shows(double value) const {
    if (!std::isfinite(value) || (scale_ != Scale::linear && value <= 0.0)) return false;
    const double margin = 1e-6 * (high_ - low_);
    return forward(value) >= low_ - margin && forward(value) <= high_ + margin;
  }
  double clamp(double value) const {
    if (scale_ != Scale::linear && value <= 0.0) return from_;
    return std::clamp((*this)(value), std::min(from_, to_), std::max(from_, to_));
  }
  Scale scale() const { return scale_; }

  // All ticks of an axis are written in one way.
  std::vector<std::string> labels(const std::vector<double>& ticks) const {
    const bool powers = scale_ == Scale::log10 && std::any_of(ticks.begin(), ticks.end(), [](double tick) {
                          return tick < 0.99e-3 || tick > 1.01e4;
                        });
    std::vector<std::string> labels;
    for (const double tick : ticks) {
      labels.push_back(powers ? power_of_ten(static_cast<int>(std::lround(std::log10(tick)))) : number(tick));
    }
    return labels;
  }

  std::vector<double> ticks(int most) const {
    std::vector<double> result;
    if (scale_ == Scale::linear) {
      const double raw = (high_ - low_) / most;
      const double power = std::pow(10.0, std::floor(std::log10(raw)));
      double step = 10.0 * power;
      for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
        if (power * factor >= raw * 0.999) {
          step = power * factor;
          break;
        }
      }
      for (double i = std::ceil(low_ / step - 1e-9); i <= std::floor(high_ / step + 1e-9); ++i) {
        result.push_back(i * step);
      }
      return result;
    }
    const double base = scale_ == Scale::log2 ? 2.0 : 10.0;
    const double first = std::ceil(low_ - 1e-9), last = std::floor(high_ + 1e-9);
    const double step = std::max(1.0, std::ceil((last - first + 1) / (most + 1)));
    for (double e = first; e <= last; e += step) result.push_back(std::pow(base, e));
    return result;
  }

 private:
  double forward(double value) const {
    switch (scale_) {
      case Scale::linear:
        return value;
      case Scale::log10:
        return std::log10(value);
      case Scale::log2:
        return std::log2(value);
    }
    return value;
  }

  Scale scale_;
  double from_, to_;
  double low_ = 0.0, high_ = 1.0;
};

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void take(double value, Scale scale) {
    if (!std::isfinite(value) || (scale != Scale::linear && value <= 0.0)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

// Ends that come from the data stay `room` away from it; zero is an end where it is near.
Axis make_axis(Scale scale, Range data, std::optional<double> low, std::optional<double> high, double room,
               double from, double to) {
  if (data.low > data.high) data = {scale == Scale::linear ? 0.0 : 0.1, 1.0};
  if (!low && scale == Scale::linear && room > 0.0 && data.low >= 0.0 &&
      data.low < 2.0 * room * (data.high - data.low)) {
    low = 0.0;
  }
  return Axis(scale, low.value_or(data.low), high.value_or(data.high), low ? 0.0 : room, high ? 0.0 : room,
              from, to);
}

std::string dot(double x, double y, const Line& line) {
  return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\"/>\n", x, y,
                     1.6 + 0.7 * line.width, line.colour);
}

std::string draw_line(const Line& line, const Axis& x, const Axis& y) {
  std::string path, out;
  bool open = false;
  for (const auto& [px, py] : line.points) {
    if (!x.shows(px) || !std::isfinite(py) || (y.scale() != Scale::linear && py <= 0.0)) {
      open = false;
      continue;
    }
    path += fmt::format("{}{:.1f} {:.1f}", open ? "L" : "M", x(px), y.clamp(py));
    open = true;
    if (line.dots) out += dot(x(px), y.clamp(py), line);
  }
  if (path.empty()) return {};
  if (line.label_at_end) {
    const auto& [px, py] = line.points.back();
    out += text(x(px), y.clamp(py) - 9, line.label, kSmall);
  }
  return fmt::format(
             "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\"{}/>\n",
             path, line.colour, line.width,
             line.dash.empty() ? std::string() : fmt::format(" stroke-dasharray=\"{}\"", line.dash)) +
         out;
}

std::string draw_band(const Band& band, const Axis& x, const Axis& y) {
  std::string path;
  for (std::size_t i = 0; i < band.x.size(); ++i) {
    if (!x.shows(band.x[i])) continue;
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x(band.x[i]), y.clamp(band.high[i]));
  }
  for (std::size_t i = band.x.size(); i-- > 0;) {
    if (x.shows(band.x[i])) path += fmt::format("L{:.1f} {:.1f}", x(band.x[i]), y.clamp(band.low[i]));
  }
  if (path.empty()) return {};
  return fmt::format("<path d=\"{}Z\" fill=\"{}\" fill-opacity=\"0.16\" stroke=\"none\"/>\n", path,
                     band.colour);
}

// Above the frame, where no line can lie under it: rows of entries, as many in each as fit.
struct Legend {
  struct Entry {
    const Line* line;
    double x;
    int row;
  };
  std::vector<Entry> entries;
  int rows = 0;
};

Legend make_legend(const Panel& panel, double width) {
  Legend legend;
  double x = 0.0;
  for (const Line& line : panel.lines) {
    if (!panel.legend || line.label.empty() || line.label_at_end) continue;
    const double wide = 46 + 6.9 * static_cast<double>(line.label.size());
    if (legend.rows == 0 || x + wide > width) {
      ++legend.rows;
      x = 0.0;
    }
    legend.entries.push_back({&line, x, legend.rows - 1});
    x += wide;
  }
  return legend;
}

std::string draw_legend(const Legend& legend, double top) {
  std::string out;
  for (const Legend::Entry& entry : legend.entries) {
    const Line& line = *entry.line;
    const double left = kLeft + entry.x, y = top - kLegendLine * (legend.rows - entry.row) + 6;
    out += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
        "stroke-width=\"{}\"{}/>\n",
        left, y, left + 24, y, line.colour, std::max(line.width, 1.6),
        line.dash.empty() ? std::string() : fmt::format(" stroke-dasharray=\"{}\"", line.dash));
    if (line.dots) out += dot(left + 12, y, line);
    out += text(left + 30, y + 4, line.label, kSmall, "start");
  }
  return out;
}

double frame_right(const Panel& panel, double width) {
  return width - kRight - (panel.colour_bar.empty() ? 0.0 : kBarRoom);
}

std::string draw_panel(const Panel& panel, double width, double top, double height, const std::string& clip) {
  const double right = frame_right(panel, width);
  const double bottom = height - kBottom;
  Range xs, ys;
  for (const Line& line : panel.lines) {
    for (const auto& [x, y] : line.points) {
      xs.take(x, panel.x_scale);
      ys.take(y, panel.y_scale);
    }
  }
  for (const Band& band : panel.bands) {
    for (std::size_t i = 0; i < band.x.size(); ++i) {
      xs.take(band.x[i], panel.x_scale);
      ys.take(band.low[i], panel.y_scale);
      ys.take(band.high[i], panel.y_scale);
    }
  }
  if (panel.image) {
    xs = {panel.image->x_low, panel.image->x_high};
    ys = {std::min(panel.image->y_top, panel.image->y_bottom),
          std::max(panel.image->y_top, panel.image->y_bottom)};
  }
  // A line may run into the frame from the side, a dot may not.
  const bool dots = std::any_of(panel.lines.begin(), panel.lines.end(), [](const Line& l) { return l.dots; });
  const bool labelled =
      std::any_of(panel.lines.begin(), panel.lines.end(), [](const Line& l) { return l.label_at_end; });
  const double room_x = labelled ? 0.1
                        : dots   ? 0.025
                                 : 0.0,
               room_y = panel.image ? 0.0
                        : labelled  ? 0.1
                                    : 0.05;
  const Axis x = make_axis(panel.x_scale, xs, panel.x_low, panel.x_high, room_x, kLeft, right);
  // A picture may have its first row at the top: then the axis grows downwards.
  const bool down = panel.image && panel.image->y_top < panel.image->y_bottom;
  const Axis y = make_axis(panel.y_scale, ys, panel.y_low, panel.y_high, room_y, down ? top : bottom,
                           down ? bottom : top);

  std::string out = text(kLeft, 22, panel.title, 13.5, "start", "font-weight=\"bold\"");
  if (panel.image) {
    const double left = x(panel.image->x_low), first_row = y(panel.image->y_top);
    out += fmt::format(
        "<image x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" preserveAspectRatio=\"none\" "
        "image-rendering=\"pixelated\" xlink:href=\"data:image/png;base64,{}\"/>\n",
        left, first_row, x(panel.image->x_high) - left, y(panel.image->y_bottom) - first_row,
        base64(panel.image->png));
  }
  const std::vector<double> y_ticks = y.ticks(6);
  const std::vector<std::string> y_labels = y.labels(y_ticks);
  for (std::size_t i = 0; i < y_ticks.size(); ++i) {
    if (!y.shows(y_ticks[i])) continue;
    const double at = y(y_ticks[i]);
    out += fmt::format("<line x1=\"{}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n",
                       panel.image ? kLeft - 5 : kLeft, at, panel.image ? kLeft : right, at,
                       panel.image ? kInk : "#e3e3e3");
    out += text(kLeft - 8, at + 4, y_labels[i], kSmall, "end");
  }
  const std::vector<double> x_ticks = x.ticks(static_cast<int>(std::clamp((right - kLeft) / 62.0, 2.0, 9.0)));
  const std::vector<std::string> x_labels = x.labels(x_ticks);
  for (std::size_t i = 0; i < x_ticks.size(); ++i) {
    if (!x.shows(x_ticks[i])) continue;
    const double at = x(x_ticks[i]);
    out += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", at,
                       bottom, at, bottom + 5, kInk);
    out += text(at, bottom + 19, x_labels[i], kSmall);
  }
  out += fmt::format("<g clip-path=\"url(#{})\">\n", clip);
  for (const Band& band : panel.bands) out += draw_band(band, x, y);
  for (const Mark& mark : panel.marks) {
    const Axis& axis = mark.vertical ? x : y;
    if (!axis.shows(mark.at)) continue;
    const double at = axis(mark.at);
    out +=
        mark.vertical
            ? fmt::format("<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\"", at, top, bottom)
            : fmt::format("<line x1=\"{1}\" y1=\"{0:.1f}\" x2=\"{2:.1f}\" y2=\"{0:.1f}\"", at, kLeft, right);
    out += " stroke=\"#777\" stroke-dasharray=\"4 4\"/>\n";
    out += mark.vertical
               ? text(at - 4, top + 14, mark.label, kSmall, "end", "fill=\"#555\"")
               : text(kLeft + 6, at < (top + bottom) / 2 ? at - 5 : at + 14, mark.label, kSmall, "start",
                      "fill=\"#555\"");  // away from the middle, where the lines are
  }
  for (const Line& line : panel.lines) out += draw_line(line, x, y);
  out += "</g>\n";
  // Around a map, not on it: its first column may be the one that matters.
  const double aside = panel.image ? 1.0 : 0.0;
  out += fmt::format(
      "<rect x=\"{0:.1f}\" y=\"{1:.1f}\" width=\"{2:.1f}\" height=\"{3:.1f}\" fill=\"none\" "
      "stroke=\"{4}\"/>\n",
      kLeft - aside, top - aside, right - kLeft + 2 * aside, bottom - top + 2 * aside, kInk);
  out += draw_legend(make_legend(panel, right - kLeft), top);
  out += text((kLeft + right) / 2, height - 14, panel.x_label, kNormal);
  out += text(0, 0, panel.y_label, kNormal, "middle",
              fmt::format("transform=\"translate(18 {:.1f}) rotate(-90)\"", (top + bottom) / 2));
  if (!panel.colour_bar.empty()) {
    constexpr int kSteps = 64;
    const double left = right + 14, step = (bottom - top) / kSteps;
    for (int i = 0; i < kSteps; ++i) {
      const Rgb c = map_colour((i + 0.5) / kSteps);
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.2f}\" width=\"{}\" height=\"{:.2f}\" fill=\"#{:02x}{:02x}{:02x}\"/>\n",
          left, bottom - (i + 1) * step, kBarWidth, step + 0.4, c.r, c.g, c.b);
    }
    const auto last = static_cast<double>(panel.colour_bar.size() - 1);
    for (std::size_t i = 0; i < panel.colour_bar.size(); ++i) {
      const double at = bottom - (bottom - top) * static_cast<double>(i) / std::max(1.0, last);
      out += text(left + kBarWidth + 4, at + 4, panel.colour_bar[i], kSmall, "start");
    }
    out += text(
        0, 0, panel.colour_label, kSmall, "middle",
        fmt::format("transform=\"translate({:.1f} {:.1f}) rotate(-90)\"", width - 6, (top + bottom) / 2));
  }
  return out;
}

std::vector<std::string> wrap(const std::string& words, std::size_t columns) {
  std::vector<std::string> lines;
  std::string line;
  for (std::size_t begin = 0; begin < words.size();) {
    const std::size_t end = std::min(words.find(' ', begin), words.size());
    if (!line.empty() && line.size() + 1 + end - begin > columns) {
      lines.push_back(line);
      line.clear();
    }
    if (!line.empty()) line += ' ';
    line += words.substr(begin, end - begin);
    begin = end + 1;
  }
  if (!line.empty()) lines.push_back(line);
  return lines;
}

}  // namespace

std::string svg(const Sheet& sheet) {
  const auto count = static_cast<int>(sheet.panels.size());
  const int columns = std::min(sheet.columns, std::max(count, 1)), rows = (count + columns - 1) / columns;
  const double width = columns * sheet.panel_width + 2 * kMargin;
  const std::vector<std::string> caption = wrap(sheet.caption, static_cast<std::size_t>((width - 40) / 6.3));
  const bool titled =
      std::any_of(sheet.panels.begin(), sheet.panels.end(), [](const Panel& p) { return !p.title.empty(); });
  const double top = titled ? kTitle : kTitle - 22;  // panels leave room for titles of their own
  int legend_rows = 0;
  for (const Panel& panel : sheet.panels)
    legend_rows =
        std::max(legend_rows, make_legend(panel, frame_right(panel, sheet.panel_width) - kLeft).rows);
  const double frame_top =
      kTop + kLegendLine * legend_rows;  // of every panel, so that frames stand side by side
  const double panel_height = sheet.panel_height + kLegendLine * legend_rows;
  const double height =
      top + rows * panel_height + kCaptionLine * static_cast<double>(caption.size()) + 2 * kMargin;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" xmlns:xlink=\"http://www.w3.org/1999/xlink\" "
      "width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"{2}\" fill=\"{3}\">\n<rect "
      "width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" fill=\"#fff\"/>\n",
      width, height, kFont, kInk);
  out += text(kMargin + 10, 30, sheet.title, 16, "start", "font-weight=\"bold\"");
  for (int i = 0; i < count; ++i) {
    const Panel& panel = sheet.panels[static_cast<std::size_t>(i)];
    const double right = frame_right(panel, sheet.panel_width);
    const std::string clip = fmt::format("clip{}", i);
    out += fmt::format(
        "<clipPath id=\"{}\"><rect x=\"{}\" y=\"{}\" width=\"{:.1f}\" height=\"{:.1f}\"/></clipPath>\n<g "
        "transform=\"translate({:.1f} {:.1f})\">\n",
        clip, kLeft, frame_top, right - kLeft, panel_height - frame_top - kBottom,
        kMargin + i % columns * sheet.panel_width, top + i / columns * panel_height);
    out += draw_panel(panel, sheet.panel_width, frame_top, panel_height, clip) + "</g>\n";
  }
  for (std::size_t i = 0; i < caption.size(); ++i) {
    out += text(kMargin + 10, top + rows * panel_height + kCaptionLine * static_cast<double>(i + 1),
                caption[i], kSmall, "start", "fill=\"#444\"");
  }
  return out + "</svg>\n";
}

std::string power_of_ten(int exponent) {
  constexpr const char* kRaised[] = {"\u2070", "\u00b9", "\u00b2", "\u00b3", "\u2074",
                                     "\u2075", "\u2076", "\u2077", "\u2078", "\u2079"};
  std::string out = "10";
  if (exponent < 0) out += "\u207b";
  for (const char digit : std::to_string(std::abs(exponent))) out += kRaised[digit - '0'];
  return out;
}

std::string series_colour(std::size_t index) {
  // Okabe and Ito, without yellow, which white paper swallows.
  constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                      "#56b4e9", "#e69f00", "#333333"};
  return kColours[index % std::size(kColours)];
}

std::string ordered_colour(std::size_t index, std::size_t count) {
  const Rgb c =
      map_colour(count < 2 ? 0.0 : 0.9 * static_cast<double>(index) / static_cast<double>(count - 1));
  return fmt::format("#{:02x}{:02x}{:02x}", c.r, c.g, c.b);
}

}  // namespace basin::probe
