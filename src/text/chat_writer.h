// Puts a conversation together from control tokens and text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace basin::text {

class Tokenizer;

/// The id of a token that a format cannot do without. Throws Error(unsupported) naming both.
std::int32_t required_token(const Tokenizer& tokenizer, std::string_view token, std::string_view format);

/// The text between two control tokens is encoded as a whole, as in the rendered template, and never parsed for special
/// tokens.
class ChatWriter {
 public:
  explicit ChatWriter(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  ChatWriter& text(std::string_view text);
  ChatWriter& token(std::int32_t id);
  /// A mark of the format, like <think>: a token where the vocabulary has it, else text.
  ChatWriter& mark(std::string_view mark);

  std::vector<std::int32_t> finish();

 private:
  void flush();

  const Tokenizer& tokenizer_;
  std::string text_;
  std::vector<std::int32_t> ids_;
};

/// `text` without white space at its ends, as templates' trim: what Python's str.strip() takes.
std::string_view trim(std::string_view text);
std::string_view trim_newlines_left(std::string_view text);
std::string_view trim_newlines(std::string_view text);

}  // namespace basin::text
