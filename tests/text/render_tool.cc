// For comparisons: reads lines {"messages": [...], "tools": [...], "thinking": bool, "answer": [ids]...} and writes lines
// {"ids": [...], "text": ...} of the rendered conversation, {"deltas": [...]} of a parsed answer, or {"error": ...}.
// Usage: render_tool MODEL TEMPLATE_FILE ARCHITECTURE.
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "basin/base/error.h"
#include "text/chat.h"
#include "text/tokenizer.h"
#include "weights/gguf.h"

namespace {

using nlohmann::ordered_json;
namespace text = basin::text;

text::Message read_message(const ordered_json& json) {
  text::Message message;
  message.role = json.at("role").get<std::string>();
  message.content = json.value("content", "");
  message.reasoning = json.value("reasoning_content", "");
  message.tool_call_id = json.value("tool_call_id", "");
  if (!json.contains("tool_calls")) return message;
  for (const ordered_json& call : json["tool_calls"]) {
    const ordered_json& function = call.at("function");
    message.tool_calls.push_back({call.value("id", ""), function.at("name").get<std::string>(),
                                  function.at("arguments").get<std::string>()});
  }
  return message;
}

text::ChatOptions read_options(const ordered_json& request) {
  text::ChatOptions options;
  for (const ordered_json& tool : request.value("tools", ordered_json::array()))
    options.tools.push_back(tool.dump());
  options.thinking = request.value("thinking", true);
  options.reasoning_effort = request.value("reasoning_effort", "");
  options.date = request.value("date", "");
  return options;
}

ordered_json answer(const text::Tokenizer& tokenizer, const text::ChatFormat& format,
                    const ordered_json& request) {
  const text::ChatOptions options = read_options(request);
  ordered_json result = ordered_json::object();
  if (request.contains("messages")) {
    std::vector<text::Message> messages;
    for (const ordered_json& message : request["messages"]) messages.push_back(read_message(message));
    const auto ids = format.render(messages, options);
    result["ids"] = ids;
    result["text"] = tokenizer.decode(ids, true);
  }
  if (request.contains("answer")) {
    const auto parser = format.parser(options);
    ordered_json& deltas = result["deltas"] = ordered_json::array();
    const auto add = [&](const std::vector<text::ChatDelta>& added) {
      static constexpr const char* kKinds[] = {"content", "reasoning", "tool_call", "tool_arguments"};
      for (const text::ChatDelta& delta : added)
        deltas.push_back({kKinds[delta.kind], delta.text, delta.index});
    };
    for (const ordered_json& id : request["answer"]) add(parser->push(id.get<std::int32_t>()));
    add(parser->finish());
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw std::runtime_error("usage: render_tool MODEL TEMPLATE_FILE ARCHITECTURE");
    const std::filesystem::path model = argv[1];
    const auto tokenizer = model.extension() == ".gguf"
                               ? text::Tokenizer::from_gguf(basin::weights::read_gguf(model))
                               : text::Tokenizer::from_directory(model);
    std::ostringstream chat_template;
    chat_template << std::ifstream(argv[2]).rdbuf();
    const auto format = text::find_chat_format(tokenizer, chat_template.str(), argv[3]);
    std::string line;
    while (std::getline(std::cin, line)) {
      try {
        std::cout << answer(tokenizer, *format, ordered_json::parse(line)).dump() << '\n';
      } catch (const basin::Error& error) {
        std::cout << ordered_json{{"error", error.what()}}.dump() << '\n';
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "render_tool: " << error.what() << '\n';
    return 1;
  }
}
