#include "text/chat_parsers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "basin/base/error.h"

namespace basin::text {
namespace {

class PlainParser : public ChatParser {
 public:
  explicit PlainParser(const Tokenizer& tokenizer) : text_(tokenizer) {}
  std::vector<ChatDelta> push(std::int32_t id) override { return content(text_.push(id)); }
  std::vector<ChatDelta> finish() override { return content(text_.finish()); }

 private:
  static std::vector<ChatDelta> content(std::string text) {
    if (text.empty()) return {};
    return {{ChatDelta::content, std::move(text)}};
  }
  AnswerText text_;
};

}  // namespace

std::unique_ptr<ChatParser> make_plain_parser(const Tokenizer& tokenizer) {
  return std::make_unique<PlainParser>(tokenizer);
}

std::string AnswerText::push(std::int32_t id) {
  return utf8_.push(id < tokenizer_.vocabulary() ? tokenizer_.token_bytes(id, false) : std::string());
}

void check_roles(std::span<const Message> messages, std::string_view format) {
  static constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant",
                                                             "tool"};
  for (const Message& message : messages) {
    if (std::find(kRoles.begin(), kRoles.end(), message.role) != kRoles.end()) continue;
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} has no role '{}'", format, message.role.substr(0, 100)),
                "roles are system, developer, user, assistant and tool");
  }
}

void refuse_tools(std::span<const Message> messages, const ChatOptions& options, std::string_view format) {
  check_roles(messages, format);
  const bool uses_tools = std::any_of(messages.begin(), messages.end(), [](const Message& message) {
    return message.role == "tool" || !message.tool_calls.empty();
  });
  if (!uses_tools && options.tools.empty()) return;
  throw Error(ErrorCode::unsupported, fmt::format("the chat format {} has no tools", format),
              "use a model whose chat template has them");
}

}  // namespace basin::text
