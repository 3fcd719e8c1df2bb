#include "probe/report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "probe/page.h"
#include "probe/png.h"

extern char** environ;

namespace basin::probe {
namespace {

// 1.5 pixels per unit: sharp in a document. Returns why it failed, or nothing.
std::string rasterise(const std::string& svg, const std::string& png) {
  std::string program = "rsvg-convert", zoom = "--zoom=1.5", output = "--output=" + png, input = svg;
  char* const arguments[] = {program.data(), zoom.data(), output.data(), input.data(), nullptr};
  pid_t child = 0;
  if (posix_spawnp(&child, program.c_str(), nullptr, nullptr, arguments, environ) != 0)
    return "rsvg-convert is not installed";
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return "rsvg-convert was lost";
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  std::remove(output.c_str() + output.find('=') + 1);  // half a picture is none
  return WIFEXITED(status) && WEXITSTATUS(status) == 127 ? "rsvg-convert is not installed"
                                                         : fmt::format("rsvg-convert failed on {}", svg);
}

}  // namespace

void write_text(const std::filesystem::path& path, std::string_view content) {
  const std::string temporary = fmt::format("{}.{}.tmp", path.string(), getpid());
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  bool ok = file != nullptr;
  if (ok) {
    ok = std::fwrite(content.data(), 1, content.size(), file) == content.size();
    ok = std::fclose(file) == 0 && ok;
    ok = ok && std::rename(temporary.c_str(), path.c_str()) == 0;
  }
  if (ok) return;
  const int error = errno;
  std::remove(temporary.c_str());
  throw Error(ErrorCode::io, fmt::format("cannot write {}: {}", path.string(), std::strerror(error)));
}

std::string write_figures(const std::filesystem::path& folder, const std::vector<Figure>& figures,
                          ThreadPool& pool) {
  const std::filesystem::path place = folder / "figures";
  std::error_code error;
  std::filesystem::create_directories(place, error);
  if (error) throw Error(ErrorCode::io, fmt::format("cannot make {}: {}", place.string(), error.message()));
  std::vector<std::string> failed(figures.size());
  pool.parallel_for(std::ssize(figures), [&](std::int64_t i, int) {
    const Figure& figure = figures[static_cast<std::size_t>(i)];
    const std::filesystem::path path = place / (figure.name + ".svg");
    write_text(path, svg(figure.sheet));
    failed[static_cast<std::size_t>(i)] = rasterise(path.string(), (place / (figure.name + ".png")).string());
  });
  for (const std::string& reason : failed) {
    if (!reason.empty()) return reason;
  }
  return {};
}

std::string page(const nlohmann::ordered_json& data) {
  const std::string_view mark = "/*DATA*/";
  std::string out(kPage);
  // No `<` may stand in the data: `</script` would end it.
  std::string text = data.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return out.replace(out.find(mark), mark.size(), safe);
}

nlohmann::ordered_json rounded(double value) {
  if (!std::isfinite(value)) return nullptr;
  if (value == 0.0) return 0.0;
  const double unit = std::pow(10.0, 3.0 - std::floor(std::log10(std::abs(value))));
  return std::stod(fmt::format("{:.4g}", std::round(value * unit) / unit));
}

std::string packed_map(const std::vector<float>& map, std::int64_t side, double low, double high) {
  std::vector<std::uint8_t> grey;
  for (const float value : map) {
    const double at =
        value > 0.0f ? (std::log10(static_cast<double>(value)) - low) / (high - low) * 255.0 : 0.0;
    grey.push_back(static_cast<std::uint8_t>(std::clamp(std::lround(at), 0L, 255L)));
  }
  return base64(png(side, static_cast<std::int64_t>(grey.size()) / side, grey));
}

std::string coloured_map(const std::vector<float>& map, std::int64_t width, std::int64_t height, double low,
                         double high, bool logarithmic) {
  std::vector<Rgb> cells;
  for (const float value : map) {
    double at = static_cast<double>(value);
    if (logarithmic && !std::isnan(at)) at = at > 0.0 ? std::log10(at) : low;
    cells.push_back(map_colour(std::isnan(at) ? at : std::clamp((at - low) / (high - low), 0.0, 1.0)));
  }
  // Drawing programs blur when they enlarge: small maps are enlarged here, cell by cell.
  constexpr std::int64_t kFine = 512;
  const std::int64_t by_x = std::max<std::int64_t>(1, kFine / width),
                     by_y = std::max<std::int64_t>(1, kFine / height);
  std::vector<Rgb> pixels;
  pixels.reserve(static_cast<std::size_t>(width * by_x * height * by_y));
  for (std::int64_t y = 0; y < height * by_y; ++y) {
    for (std::int64_t x = 0; x < width * by_x; ++x) {
      pixels.push_back(cells[static_cast<std::size_t>(y / by_y * width + x / by_x)]);
    }
  }
  return png(width * by_x, height * by_y, pixels);
}

}  // namespace basin::probe
