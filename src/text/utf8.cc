#include "text/utf8.h"

#include <array>

#include "text/tokenizer.h"

namespace basin::text {
namespace {

struct Alphabet {
  std::array<char32_t, 256> character{};
  std::array<int, 0x144> byte{};  // by code point, -1 where the alphabet has none
};

Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.byte.fill(-1);
  char32_t next = 0x100;
  for (std::size_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    const char32_t c = printable ? static_cast<char32_t>(b) : next++;
    alphabet.character[b] = c;
    alphabet.byte[c] = static_cast<int>(b);
  }
  return alphabet;
}

const Alphabet& alphabet() {
  static const Alphabet table = make_alphabet();
  return table;
}

std::uint8_t byte_at(std::string_view text, std::size_t i) {
  return static_cast<std::uint8_t>(text[i]);
}

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

}  // namespace

Utf8Step first_character(std::string_view text) {
  const std::uint8_t lead = byte_at(text, 0);
  if (lead < 0x80) return {Utf8Step::complete, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Utf8Step::invalid, 1, 0};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte is narrower after some leads: no overlong forms, no surrogates, nothing beyond U+10FFFF.
  std::uint8_t low = 0x80, high = 0xbf;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  char32_t code_point = lead & (0xffu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Step::incomplete, i, 0};
    const std::uint8_t next = byte_at(text, i);
    if (next < low || next > high) return {Utf8Step::invalid, i, 0};
    code_point = (code_point << 6) | (next & 0x3fu);
    low = 0x80;
    high = 0xbf;
  }
  return {Utf8Step::complete, length, code_point};
}

std::size_t last_character(std::string_view text) {
  std::size_t i = text.size() - 1;
  while (i > 0 && (byte_at(text, i) & 0xc0) == 0x80) --i;
  return i;
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&out](char32_t byte) {
    out.push_back(static_cast<char>(static_cast<std::uint8_t>(byte)));
  };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xc0 | (c >> 6));
  } else if (c < 0x10000) {
    put(0xe0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3f));
  } else {
    put(0xf0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3f));
    put(0x80 | ((c >> 6) & 0x3f));
  }
  put(0x80 | (c & 0x3f));
}

bool is_white_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

std::optional<std::string> bytes_of_spelling(std::string_view spelling) {
  std::string bytes;
  bytes.reserve(spelling.size());
  while (!spelling.empty()) {
    const Utf8Step step = first_character(spelling);
    if (step.kind != Utf8Step::complete || step.code_point >= alphabet().byte.size()) return std::nullopt;
    const int byte = alphabet().byte[step.code_point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(static_cast<std::uint8_t>(byte)));
    spelling.remove_prefix(step.bytes);
  }
  return bytes;
}

std::string spelling_of_byte(std::uint8_t byte) {
  std::string spelling;
  append_utf8(spelling, alphabet().character[byte]);
  return spelling;
}

std::optional<std::size_t> first_invalid_utf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    if (byte_at(text, i) < 0x80) {
      ++i;
      continue;
    }
    const Utf8Step step = first_character(text.substr(i));
    if (step.kind != Utf8Step::complete) return i;
    i += step.bytes;
  }
  return std::nullopt;
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_.append(bytes);
  std::string text;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Step step = first_character(rest);
    if (step.kind == Utf8Step::incomplete) break;
    text.append(step.kind == Utf8Step::complete ? rest.substr(0, step.bytes) : kReplacement);
    rest.remove_prefix(step.bytes);
  }
  pending_ = std::string(rest);
  return text;
}

std::string Utf8Stream::finish() {
  const bool cut = !pending_.empty();  // what waits is the start of one character
  pending_.clear();
  return cut ? std::string(kReplacement) : std::string();
}

}  // namespace basin::text
