// PNG images in memory, and the colours of maps.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace basin::probe {

struct Rgb {
  std::uint8_t r, g, b;
};

/// From 0 (dark) to 1 (light): viridis, whose steps look equally far apart. NaN is light grey.
Rgb map_colour(double value);

/// 8-bit grey or RGB. `pixels` row by row from the top.
std::string png(std::int64_t width, std::int64_t height, std::span<const std::uint8_t> grey);
std::string png(std::int64_t width, std::int64_t height, std::span<const Rgb> pixels);

std::string base64(std::string_view bytes);

}  // namespace basin::probe
