// Qwen2.5 and Qwen3: ChatML with tools in the system message and Hermes' form of calls; Qwen3 thinks before it answers.
#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"
#include "text/chat_formats.h"
#include "text/chat_json.h"
#include "text/chat_parsers.h"
#include "text/chat_writer.h"
#include "text/chatml.h"
#include "text/tokenizer.h"

namespace basin::text {
namespace {

constexpr std::string_view kToolsBefore =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>";
constexpr std::string_view kToolsAfter =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";

/// The thought and what follows it, when a client sent both as content.
struct Answer {
  std::string_view reasoning, content;
};

Answer split_thought(const Message& message) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  if (!message.reasoning.empty()) return {message.reasoning, message.content};
  const std::string_view all = message.content;
  const std::size_t first_close = all.find(kClose);
  if (first_close == std::string_view::npos) return {{}, all};
  std::string_view thought = all.substr(0, first_close);
  if (const std::size_t open = thought.rfind(kOpen); open != std::string_view::npos)
    thought.remove_prefix(open + kOpen.size());
  return {trim_newlines(thought), trim_newlines_left(all.substr(all.rfind(kClose) + kClose.size()))};
}

bool is_tool_response(const Message& message) {
  return message.content.starts_with("<tool_response>") && message.content.ends_with("</tool_response>");
}

/// Thoughts before the last question of the user are dropped.
std::size_t last_question(std::span<const Message> messages) {
  for (std::size_t i = messages.size(); i > 0; --i) {
    if (messages[i - 1].role == "user" && !is_tool_response(messages[i - 1])) return i - 1;
  }
  return messages.empty() ? 0 : messages.size() - 1;
}

class Qwen : public ChatFormat {
 public:
  Qwen(const Tokenizer& tokenizer, QwenOptions options)
      : tokenizer_(tokenizer), frame_(tokenizer), options_(std::move(options)) {}

  std::string_view name() const override { return "qwen"; }

  std::vector<std::int32_t> render(std::span<const Message> messages,
                                   const ChatOptions& options) const override {
    options_.tools ? check_roles(messages, name()) : refuse_tools(messages, options, name());
    if (!options.thinking && options_.thinks && (!options_.has_switch || options_.opens_thought)) {
      throw Error(ErrorCode::unsupported, "the model's chat template has no switch for thinking");
    }
    ChatWriter writer(tokenizer_);
    write_system(writer, messages, options);
    const std::size_t question = last_question(messages);
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const Message& message = messages[i];
      if (message.role == "user" || (is_system(message) && i > 0)) {
        frame_.turn(writer, is_system(message) ? "system" : "user", message.content);
      } else if (message.role == "assistant") {
        write_answer(writer, message, i > question, i + 1 == messages.size());
      } else if (message.role == "tool") {
        write_tool_response(writer, messages, i);
      }
    }
    frame_.open(writer, "assistant");
    if (options_.opens_thought) {
      writer.mark("<think>").text("\n");
    } else if (options_.has_switch && !options.thinking) {
      writer.mark("<think>").text("\n\n").mark("</think>").text("\n\n");
    }
    return writer.finish();
  }

  std::unique_ptr<ChatParser> parser(const ChatOptions& options) const override {
    return make_tagged_parser(
        tokenizer_,
        {.thinks = options_.thinks, .in_thought = options_.opens_thought, .tools = !options.tools.empty()});
  }

 private:
  void write_system(ChatWriter& writer, std::span<const Message> messages, const ChatOptions& options) const {
    const bool given = !messages.empty() && is_system(messages[0]);
    const std::string_view system = given                    ? std::string_view(messages[0].content)
                                    : options.default_system ? std::string_view(options_.default_system)
                                                             : std::string_view();
    if (options.tools.empty()) {
      if (given || !system.empty()) frame_.turn(writer, "system", system);
      return;
    }
    frame_.open(writer, "system");
    if (given || !system.empty()) writer.text(system).text("\n\n");
    writer.text(kToolsBefore);
    for (const std::string& tool : options.tools) writer.text("\n").text(python_json(read_tool(tool)));
    writer.text(kToolsAfter);
    frame_.close(writer);
  }

  void write_answer(ChatWriter& writer, const Message& message, bool after_question, bool last) const {
    const Answer answer = options_.thinks ? split_thought(message) : Answer{{}, message.content};
    frame_.open(writer, "assistant");
    const bool drops_all = options_.thinks && !options_.keeps_thoughts;
    std::string_view content = drops_all ? trim_newlines_left(answer.content) : answer.content;
    if (options_.keeps_thoughts && after_question && (last || !answer.reasoning.empty())) {
      writer.mark("<think>").text("\n").text(trim_newlines(answer.reasoning)).text("\n");
      writer.mark("</think>").text("\n\n");
      content = trim_newlines_left(content);
    }
    writer.text(content);
    bool first = answer.content.empty();
    for (const ToolCall& call : message.tool_calls) {
      if (!first) writer.text("\n");
      first = false;
      writer.mark("<tool_call>").text(fmt::format("\n{{\"name\": \"{}\", \"arguments\": ", call.name));
      const auto arguments = parse_json(call.arguments);
      writer.text(arguments ? python_json(*arguments) : call.arguments).text("}\n").mark("</tool_call>");
    }
    frame_.close(writer);
  }

  void write_tool_response(ChatWriter& writer, std::span<const Message> messages, std::size_t i) const {
    const bool first = i == 0 || messages[i - 1].role != "tool";
    const bool last = i + 1 == messages.size() || messages[i + 1].role != "tool";
    if (first) {
      frame_.open(writer, "user");
    } else {
      writer.text("\n");
    }
    writer.mark("<tool_response>").text("\n").text(messages[i].content).text("\n").mark("</tool_response>");
    if (last) frame_.close(writer);
  }

  const Tokenizer& tokenizer_;
  ChatmlFrame frame_;
  QwenOptions options_;
};

}  // namespace

std::unique_ptr<ChatFormat> make_qwen(const Tokenizer& tokenizer, QwenOptions options) {
  return std::make_unique<Qwen>(tokenizer, std::move(options));
}

}  // namespace basin::text
