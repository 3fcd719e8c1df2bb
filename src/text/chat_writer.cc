#include "text/chat_writer.h"

#include <fmt/format.h>

#include "basin/base/error.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

// Beside White_Space Python counts the four separators of ASCII.
bool is_python_space(char32_t c) {
  return is_white_space(c) || (c >= 0x1c && c <= 0x1f);
}

}  // namespace

std::int32_t required_token(const Tokenizer& tokenizer, std::string_view token, std::string_view format) {
  if (const auto id = tokenizer.id_of(token)) return *id;
  throw Error(ErrorCode::unsupported, fmt::format("the tokenizer has no {}, which {} needs", token, format),
              "use a plain prompt instead of a chat");
}

ChatWriter& ChatWriter::text(std::string_view text) {
  text_ += text;
  return *this;
}

ChatWriter& ChatWriter::token(std::int32_t id) {
  flush();
  ids_.push_back(id);
  return *this;
}

ChatWriter& ChatWriter::mark(std::string_view mark) {
  const auto id = tokenizer_.id_of(mark);
  return id ? token(*id) : text(mark);
}

std::vector<std::int32_t> ChatWriter::finish() {
  flush();
  return std::move(ids_);
}

void ChatWriter::flush() {
  const auto part = tokenizer_.encode(text_, false);
  ids_.insert(ids_.end(), part.begin(), part.end());
  text_.clear();
}

std::string_view trim(std::string_view text) {
  while (!text.empty()) {
    const Utf8Step first = first_character(text);
    if (first.kind != Utf8Step::complete || !is_python_space(first.code_point)) break;
    text.remove_prefix(first.bytes);
  }
  while (!text.empty()) {
    const std::size_t last = last_character(text);
    const Utf8Step step = first_character(text.substr(last));
    if (step.kind != Utf8Step::complete || !is_python_space(step.code_point)) break;
    text = text.substr(0, last);
  }
  return text;
}

std::string_view trim_newlines_left(std::string_view text) {
  const std::size_t begin = text.find_first_not_of('\n');
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin);
}

std::string_view trim_newlines(std::string_view text) {
  text = trim_newlines_left(text);
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

}  // namespace basin::text
