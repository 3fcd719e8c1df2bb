// Names taken from hostile files, made fit for a message: short, and without control or escape sequences.
#pragma once

#include <string>
#include <string_view>

namespace basin::weights {

inline std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 200;
  std::string out;
  for (const char c : text.substr(0, kLongest)) out += c >= 0x20 && c < 0x7f ? c : '?';
  return text.size() > kLongest ? out + "..." : out;
}

}  // namespace basin::weights
