#include "probe/png.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>

#include "basin/base/error.h"

namespace basin::probe {
namespace {

// Every sixteenth of matplotlib's viridis; between them colours are interpolated.
constexpr Rgb kViridis[] = {{68, 1, 84},    {72, 26, 108},  {71, 47, 125},  {65, 68, 135},  {57, 86, 140},
                            {49, 104, 142}, {42, 120, 142}, {35, 136, 142}, {31, 152, 139}, {34, 168, 132},
                            {53, 183, 121}, {84, 197, 104}, {122, 209, 81}, {165, 219, 54}, {210, 226, 27},
                            {237, 229, 27}, {253, 231, 37}};

void put(std::string& out, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>((value >> shift) & 0xff);
}

void chunk(std::string& out, const std::string& type, const std::string& data) {
  put(out, static_cast<std::uint32_t>(data.size()));
  const std::string body = type + data;
  out += body;
  put(out, static_cast<std::uint32_t>(
               crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()))));
}

std::string encode(std::int64_t width, std::int64_t height, int channels, const std::uint8_t* pixels) {
  const auto row = static_cast<std::size_t>(width * channels);
  std::string raw;
  raw.reserve((row + 1) * static_cast<std::size_t>(height));
  for (std::int64_t y = 0; y < height; ++y) {
    raw += '\0';  // no filter
    raw.append(reinterpret_cast<const char*>(pixels) + static_cast<std::size_t>(y) * row, row);
  }
  uLongf size = compressBound(raw.size());
  std::string packed(size, '\0');
  if (compress2(reinterpret_cast<Bytef*>(packed.data()), &size, reinterpret_cast<const Bytef*>(raw.data()),
                raw.size(), 9) != Z_OK) {
    throw Error(ErrorCode::internal, "zlib refused an image");
  }
  packed.resize(size);
  std::string out = "\x89PNG\r\n\x1a\n";
  std::string header;
  put(header, static_cast<std::uint32_t>(width));
  put(header, static_cast<std::uint32_t>(height));
  header += '\x08';
  header += channels == 1 ? '\x00' : '\x02';
  header.append(3, '\0');
  chunk(out, "IHDR", header);
  chunk(out, "IDAT", packed);
  chunk(out, "IEND", {});
  return out;
}

}  // namespace

Rgb map_colour(double value) {
  if (!(value >= 0.0 || value < 0.0)) return {232, 232, 234};
  constexpr int kLast = static_cast<int>(std::size(kViridis)) - 1;
  const double at = std::clamp(value, 0.0, 1.0) * kLast;
  const int low = std::min(static_cast<int>(at), kLast - 1);
  const double part = at - low;
  const auto mix = [&](std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::lround(a + (b - a) * part));
  };
  const Rgb &a = kViridis[low], &b = kViridis[low + 1];
  return {mix(a.r, b.r), mix(a.g, b.g), mix(a.b, b.b)};
}

std::string png(std::int64_t width, std::int64_t height, std::span<const std::uint8_t> grey) {
  return encode(width, height, 1, grey.data());
}

std::string png(std::int64_t width, std::int64_t height, std::span<const Rgb> pixels) {
  static_assert(sizeof(Rgb) == 3);
  return encode(width, height, 3, &pixels.data()->r);
}

std::string base64(std::string_view bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t word = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      word = word << 8 | (i + j < bytes.size() ? static_cast<std::uint8_t>(bytes[i + j]) : 0u);
    }
    for (std::size_t j = 0; j < 4; ++j)
      out += i + j <= bytes.size() ? kDigits[(word >> (18 - 6 * j)) & 63] : '=';
  }
  return out;
}

}  // namespace basin::probe
