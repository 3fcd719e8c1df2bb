// Llama 3: plain turns. From 3.1 on a system message with dates comes first, and tools are described in the first message of
// the user.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "basin/base/error.h"
#include "text/chat_formats.h"
#include "text/chat_json.h"
#include "text/chat_parsers.h"
#include "text/chat_writer.h"
#include "text/tokenizer.h"

namespace basin::text {
namespace {

constexpr std::string_view kToolsBefore =
    "Given the following functions, please respond with a JSON for a function call with its proper arguments "
    "that best "
    "answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": dictionary "
    "of argument "
    "name and its value}.Do not use variables.\n\n";

// "2026-11-30" as "30 Nov 2026".
std::string short_date(std::string_view date) {
  static constexpr std::array<std::string_view, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                               "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const bool digits =
      std::all_of(date.begin(), date.end(), [](char c) { return c == '-' || (c >= '0' && c <= '9'); });
  std::size_t month = 0;
  if (date.size() == 10 && digits && date[4] == '-' && date[7] == '-')
    month = static_cast<std::size_t>((date[5] - '0') * 10 + (date[6] - '0'));
  if (month < 1 || month > 12) {
    throw Error(ErrorCode::invalid_argument, fmt::format("'{}' is no date", date.substr(0, 20)),
                "write it as 2026-11-30");
  }
  return fmt::format("{} {} {}", date.substr(8), kMonths[month - 1], date.substr(0, 4));
}

class Llama3 : public ChatFormat {
 public:
  Llama3(const Tokenizer& tokenizer, Llama3Options options)
      : tokenizer_(tokenizer),
        options_(options),
        start_(required_token(tokenizer, "<|start_header_id|>", "Llama 3's chat format")),
        end_(required_token(tokenizer, "<|end_header_id|>", "Llama 3's chat format")),
        turn_(required_token(tokenizer, "<|eot_id|>", "Llama 3's chat format")) {}

  std::string_view name() const override { return "llama3"; }

  std::vector<std::int32_t> render(std::span<const Message> messages,
                                   const ChatOptions& options) const override {
    options_.tools ? check_roles(messages, name()) : refuse_tools(messages, options, name());
    ChatWriter writer(tokenizer_);
    if (const auto bos = tokenizer_.bos()) writer.token(*bos);
    std::size_t next = 0;
    if (options_.dates) {
      const bool given = !messages.empty() && is_system(messages[0]);
      write_dates(writer, given ? std::string_view(messages[0].content) : std::string_view(), options);
      next = given ? 1 : 0;
    }
    if (!options.tools.empty()) write_tools(writer, messages, next++, options);
    for (; next < messages.size(); ++next) write(writer, messages[next]);
    open(writer, "assistant");
    return writer.finish();
  }

  std::unique_ptr<ChatParser> parser(const ChatOptions& options) const override {
    return options.tools.empty() ? make_plain_parser(tokenizer_) : make_json_call_parser(tokenizer_, options);
  }

 private:
  void open(ChatWriter& writer, std::string_view role) const {
    writer.token(start_).text(role).token(end_).text("\n\n");
  }

  void write_dates(ChatWriter& writer, std::string_view system, const ChatOptions& options) const {
    open(writer, "system");
    if (!options.tools.empty()) writer.text("Environment: ipython\n");
    writer.text("Cutting Knowledge Date: December 2023\nToday Date: ");
    // Without a date the template's own stands there, which the model knows from its training.
    writer.text(options.date.empty() ? std::string("26 Jul 2024") : short_date(options.date)).text("\n\n");
    writer.text(trim(system)).token(turn_);
  }

  void write_tools(ChatWriter& writer, std::span<const Message> messages, std::size_t first,
                   const ChatOptions& options) const {
    if (first == messages.size()) {
      throw Error(ErrorCode::invalid_argument,
                  "Llama 3's chat format describes tools in the user's first message, and there is none");
    }
    open(writer, "user");
    writer.text(kToolsBefore);
    for (const std::string& tool : options.tools) writer.text(read_tool(tool).dump(4)).text("\n\n");
    writer.text(trim(messages[first].content)).token(turn_);
  }

  void write(ChatWriter& writer, const Message& message) const {
    if (message.role == "tool") {
      open(writer, "ipython");
      writer.text(nlohmann::ordered_json(message.content).dump()).token(turn_);
      return;
    }
    open(writer, is_system(message) ? "system" : message.role);
    if (message.tool_calls.empty()) {
      writer.text(trim(message.content)).token(turn_);
      return;
    }
    if (message.tool_calls.size() > 1) {
      throw Error(ErrorCode::invalid_argument, "Llama 3's chat format has one tool call in a message",
                  "put each call and its answer into messages of their own");
    }
    const ToolCall& call = message.tool_calls[0];
    const auto arguments = parse_json(call.arguments);
    writer.text(fmt::format("{{\"name\": \"{}\", \"parameters\": {}}}", call.name,
                            python_json(arguments ? *arguments : nlohmann::ordered_json(call.arguments))));
    writer.token(turn_);
  }

  const Tokenizer& tokenizer_;
  Llama3Options options_;
  std::int32_t start_, end_, turn_;
};

}  // namespace

std::unique_ptr<ChatFormat> make_llama3(const Tokenizer& tokenizer, Llama3Options options) {
  return std::make_unique<Llama3>(tokenizer, options);
}

}  // namespace basin::text
