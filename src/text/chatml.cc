#include <fmt/format.h>

#include <algorithm>

#include "text/chat_formats.h"
#include "text/chat_parsers.h"
#include "text/chat_writer.h"
#include "text/chatml.h"
#include "text/tokenizer.h"

namespace basin::text {

ChatmlFrame::ChatmlFrame(const Tokenizer& tokenizer)
    : start_(required_token(tokenizer, "<|im_start|>", "ChatML")),
      end_(required_token(tokenizer, "<|im_end|>", "ChatML")) {}

void ChatmlFrame::open(ChatWriter& writer, std::string_view role) const {
  writer.token(start_).text(role).text("\n");
}

void ChatmlFrame::close(ChatWriter& writer) const {
  writer.token(end_).text("\n");
}

void ChatmlFrame::turn(ChatWriter& writer, std::string_view role, std::string_view content) const {
  open(writer, role);
  writer.text(content);
  close(writer);
}

namespace {

class Chatml : public ChatFormat {
 public:
  Chatml(const Tokenizer& tokenizer, std::string default_system)
      : tokenizer_(tokenizer), frame_(tokenizer), default_system_(std::move(default_system)) {}

  std::string_view name() const override { return "chatml"; }

  std::vector<std::int32_t> render(std::span<const Message> messages,
                                   const ChatOptions& options) const override {
    refuse_tools(messages, options, name());
    ChatWriter writer(tokenizer_);
    const bool has_system =
        std::any_of(messages.begin(), messages.end(), [](const Message& m) { return is_system(m); });
    if (!has_system && options.default_system && !default_system_.empty())
      frame_.turn(writer, "system", default_system_);
    for (const Message& message : messages) {
      frame_.turn(writer, is_system(message) ? "system" : message.role, message.content);
    }
    frame_.open(writer, "assistant");
    return writer.finish();
  }

  std::unique_ptr<ChatParser> parser(const ChatOptions&) const override {
    return make_plain_parser(tokenizer_);
  }

 private:
  const Tokenizer& tokenizer_;
  ChatmlFrame frame_;
  std::string default_system_;
};

}  // namespace

std::unique_ptr<ChatFormat> make_chatml(const Tokenizer& tokenizer, std::string default_system) {
  return std::make_unique<Chatml>(tokenizer, std::move(default_system));
}

}  // namespace basin::text
