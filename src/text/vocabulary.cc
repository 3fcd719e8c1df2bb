#include "text/vocabulary.h"

#include <fmt/format.h>

#include <algorithm>

namespace basin::text {

std::string byte_token_name(std::uint8_t byte) {
  return fmt::format("<0x{:02X}>", byte);
}

bool append_bytes(std::string_view text, const ByteTokens& tokens, std::vector<std::int32_t>& ids) {
  const auto token = [&](char byte) { return tokens[static_cast<std::uint8_t>(byte)]; };
  if (std::any_of(text.begin(), text.end(), [&](char byte) { return token(byte) < 0; })) return false;
  for (const char byte : text) ids.push_back(token(byte));
  return true;
}

}  // namespace basin::text
