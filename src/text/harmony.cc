// Harmony, the format of gpt-oss: a system message of the program, a developer message with instructions and tools, and
// messages of the assistant on channels: analysis (thoughts), commentary (calls, and words between them) and final.
#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"
#include "text/chat_formats.h"
#include "text/chat_parsers.h"
#include "text/chat_writer.h"
#include "text/harmony_tokens.h"
#include "text/harmony_tools.h"
#include "text/tokenizer.h"

namespace basin::text {
namespace {

bool is_final(const Message& message) {
  return message.role == "assistant" && message.tool_calls.empty();
}

class Harmony : public ChatFormat {
 public:
  explicit Harmony(const Tokenizer& tokenizer) : tokenizer_(tokenizer), tokens_(tokenizer) {}

  std::string_view name() const override { return "harmony"; }

  std::vector<std::int32_t> render(std::span<const Message> messages,
                                   const ChatOptions& options) const override {
    check_roles(messages, name());
    if (!options.thinking) {
      throw Error(ErrorCode::unsupported, "models of harmony always think",
                  "ask for the reasoning effort low");
    }
    ChatWriter writer(tokenizer_);
    write_system(writer, options);
    std::size_t next = 0;
    while (next < messages.size() && is_system(messages[next])) ++next;
    write_developer(writer, messages.first(next), options);
    // Thoughts that led to a final answer are dropped.
    std::size_t last_final = 0;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (is_final(messages[i])) last_final = i + 1;
    }
    for (; next < messages.size(); ++next) {
      const Message& message = messages[next];
      if (message.role == "assistant") {
        write_answer(writer, message, next >= last_final);
      } else if (message.role == "tool") {
        open(writer, fmt::format("functions.{} to=assistant", answered_call(messages, next)), "commentary");
        writer.text(message.content).token(tokens_.end);
      } else if (is_system(message)) {
        write_developer(writer, messages.subspan(next, 1), {});
      } else {
        open(writer, "user", {});
        writer.text(message.content).token(tokens_.end);
      }
    }
    writer.token(tokens_.start).text("assistant");
    return writer.finish();
  }

  std::unique_ptr<ChatParser> parser(const ChatOptions&) const override {
    return make_harmony_parser(tokenizer_, tokens_);
  }

 private:
  void open(ChatWriter& writer, std::string_view header, std::string_view channel) const {
    writer.token(tokens_.start).text(header);
    if (!channel.empty()) writer.token(tokens_.channel).text(channel);
    writer.token(tokens_.message);
  }

  void write_system(ChatWriter& writer, const ChatOptions& options) const {
    const std::string effort = options.reasoning_effort.empty() ? "medium" : options.reasoning_effort;
    if (effort != "low" && effort != "medium" && effort != "high") {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the reasoning effort '{}' is not known", effort.substr(0, 100)),
                  "it is low, medium or high");
    }
    open(writer, "system", {});
    writer.text("You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n");
    if (!options.date.empty()) writer.text("Current date: ").text(options.date).text("\n");
    writer.text("\nReasoning: ").text(effort);
    writer.text(
        "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.");
    if (!options.tools.empty())
      writer.text("\nCalls to these tools must go to the commentary channel: 'functions'.");
    writer.token(tokens_.end);
  }

  void write_developer(ChatWriter& writer, std::span<const Message> messages,
                       const ChatOptions& options) const {
    std::string text;
    for (const Message& message : messages)
      text += (text.empty() ? "# Instructions\n\n" : "\n\n") + message.content;
    if (!options.tools.empty()) text += (text.empty() ? "" : "\n\n") + harmony_tools(options.tools);
    if (text.empty()) return;
    open(writer, "developer", {});
    writer.text(text).token(tokens_.end);
  }

  void write_answer(ChatWriter& writer, const Message& message, bool with_thoughts) const {
    if (with_thoughts && !message.reasoning.empty()) {
      open(writer, "assistant", "analysis");
      writer.text(message.reasoning).token(tokens_.end);
    }
    if (is_final(message)) {
      open(writer, "assistant", "final");
      writer.text(message.content).token(tokens_.end);
      return;
    }
    if (!message.content.empty()) {
      open(writer, "assistant", "commentary");
      writer.text(message.content).token(tokens_.end);
    }
    for (const ToolCall& call : message.tool_calls) {
      writer.token(tokens_.start).text(fmt::format("assistant to=functions.{}", call.name));
      writer.token(tokens_.channel).text("commentary ").token(tokens_.constrain).text("json");
      writer.token(tokens_.message).text(call.arguments).token(tokens_.call);
    }
  }

  /// The function that message `at` is the answer of: by its id, or, without one, the first call not answered yet.
  std::string answered_call(std::span<const Message> messages, std::size_t at) const {
    std::size_t first = at;
    while (first > 0 && messages[first - 1].role == "tool") --first;
    const std::string& id = messages[at].tool_call_id;
    for (std::size_t i = at; i > 0; --i) {
      const auto& calls = messages[i - 1].tool_calls;
      if (id.empty() && i == first && at - first < calls.size()) return calls[at - first].name;
      const auto found =
          std::find_if(calls.begin(), calls.end(), [&](const ToolCall& c) { return c.id == id; });
      if (!id.empty() && found != calls.end()) return found->name;
    }
    throw Error(ErrorCode::invalid_argument,
                id.empty()
                    ? std::string("a tool's message answers no call of the assistant")
                    : fmt::format("a tool's message answers the call '{}', which no message before it has",
                                  id.substr(0, 100)));
  }

  const Tokenizer& tokenizer_;
  HarmonyTokens tokens_;
};

}  // namespace

HarmonyTokens::HarmonyTokens(const Tokenizer& tokenizer)
    : start(required_token(tokenizer, "<|start|>", "harmony")),
      end(required_token(tokenizer, "<|end|>", "harmony")),
      message(required_token(tokenizer, "<|message|>", "harmony")),
      channel(required_token(tokenizer, "<|channel|>", "harmony")),
      constrain(required_token(tokenizer, "<|constrain|>", "harmony")),
      call(required_token(tokenizer, "<|call|>", "harmony")),
      done(required_token(tokenizer, "<|return|>", "harmony")) {}

std::unique_ptr<ChatFormat> make_harmony(const Tokenizer& tokenizer) {
  return std::make_unique<Harmony>(tokenizer);
}

}  // namespace basin::text
