// Gemma 2 and 3: turns of user and model in alternation; a system message is put before the user's first one.
#include <fmt/format.h>

#include "basin/base/error.h"
#include "text/chat_formats.h"
#include "text/chat_parsers.h"
#include "text/chat_writer.h"
#include "text/tokenizer.h"

namespace basin::text {
namespace {

class Gemma : public ChatFormat {
 public:
  Gemma(const Tokenizer& tokenizer, GemmaOptions options)
      : tokenizer_(tokenizer),
        options_(options),
        start_(required_token(tokenizer, "<start_of_turn>", "Gemma's chat format")),
        end_(required_token(tokenizer, "<end_of_turn>", "Gemma's chat format")) {}

  std::string_view name() const override { return "gemma"; }

  std::vector<std::int32_t> render(std::span<const Message> messages,
                                   const ChatOptions& options) const override {
    refuse_tools(messages, options, name());
    ChatWriter writer(tokenizer_);
    if (const auto bos = tokenizer_.bos()) writer.token(*bos);
    std::string prefix;
    if (!messages.empty() && is_system(messages[0])) {
      if (!options_.system) {
        throw Error(ErrorCode::invalid_argument, "the model's chat template has no system message",
                    "put its text into the user's first message");
      }
      prefix = messages[0].content + "\n\n";
      messages = messages.subspan(1);
    }
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const bool user = messages[i].role == "user";
      if (user != (i % 2 == 0) || is_system(messages[i])) {
        throw Error(
            ErrorCode::invalid_argument,
            fmt::format(
                "Gemma's chat format takes user and assistant in turn; message {} after the system's is "
                "of '{}'",
                i + 1, messages[i].role));
      }
      open(writer, user ? "user" : "model");
      if (i == 0) writer.text(prefix);
      writer.text(trim(messages[i].content)).token(end_).text("\n");
    }
    open(writer, "model");
    return writer.finish();
  }

  std::unique_ptr<ChatParser> parser(const ChatOptions&) const override {
    return make_plain_parser(tokenizer_);
  }

 private:
  void open(ChatWriter& writer, std::string_view role) const { writer.token(start_).text(role).text("\n"); }

  const Tokenizer& tokenizer_;
  GemmaOptions options_;
  std::int32_t start_, end_;
};

}  // namespace

std::unique_ptr<ChatFormat> make_gemma(const Tokenizer& tokenizer, GemmaOptions options) {
  return std::make_unique<Gemma>(tokenizer, options);
}

}  // namespace basin::text
