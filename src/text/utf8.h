// UTF-8 on bytes, and the byte alphabet of byte-level BPE.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace basin::text {

struct Utf8Step {
  enum Kind { complete, incomplete, invalid } kind;
  std::size_t bytes;  // complete: of the character; otherwise of the maximal well-formed start, at least 1
  char32_t code_point;
};

/// The first character of `text`, which must not be empty. `incomplete` means that `text` ends inside a sequence
/// that could still become well-formed.
Utf8Step first_character(std::string_view text);

/// The start of the last character of well-formed, non-empty `text`.
std::size_t last_character(std::string_view text);

void append_utf8(std::string& out, char32_t code_point);

/// Unicode property White_Space.
bool is_white_space(char32_t code_point);

/// The bytes spelled by characters of the byte-level alphabet (GPT-2: printable Latin-1 bytes stand for
/// themselves, the others for U+0100 onwards), or nothing when a character lies outside of it.
std::optional<std::string> bytes_of_spelling(std::string_view spelling);
std::string spelling_of_byte(std::uint8_t byte);

}  // namespace basin::text
