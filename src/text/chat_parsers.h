// What the formats share: parsers of answers, and checks of messages.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "text/chat.h"
#include "text/tokenizer.h"

namespace basin::text {

struct Tags {
  bool thinks = false;      // a thought may come first, between <think> and </think>
  bool in_thought = false;  // the prompt has opened it already
  bool tools = false;       // calls stand between <tool_call> and </tool_call>: else those are content
};
std::unique_ptr<ChatParser> make_tagged_parser(const Tokenizer& tokenizer, Tags tags);

/// Throws Error(invalid_argument) for a tool of `options` that is none.
std::unique_ptr<ChatParser> make_json_call_parser(const Tokenizer& tokenizer, const ChatOptions& options);

/// The text of generated tokens, in whole characters: without special tokens, and nothing for ids that a model has beyond
/// its tokenizer. Throws Error(invalid_argument) for negative ids.
class AnswerText {
 public:
  explicit AnswerText(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(std::int32_t id);
  std::string finish() { return utf8_.finish(); }

 private:
  const Tokenizer& tokenizer_;
  Utf8Stream utf8_;
};

/// Formats other than harmony know no difference between the two.
inline bool is_system(const Message& message) {
  return message.role == "system" || message.role == "developer";
}

/// Throws Error(invalid_argument) for a role that is not one of the five.
void check_roles(std::span<const Message> messages, std::string_view format);
/// Throws Error(unsupported) for tools, calls and answers of tools; checks the roles, too.
void refuse_tools(std::span<const Message> messages, const ChatOptions& options, std::string_view format);

}  // namespace basin::text
