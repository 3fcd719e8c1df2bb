// Which format a model's chat template is.
#include <fmt/format.h>

#include "basin/base/error.h"
#include "text/chat_formats.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace basin::text {
namespace {

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// In a template newlines are two characters.
constexpr std::string_view kHermesTools = "# Tools\\n\\nYou may call one or more functions";

std::unique_ptr<ChatFormat> chatml_family(const Tokenizer& tokenizer, std::string_view chat_template) {
  QwenOptions options;
  options.default_system = default_system(chat_template);
  options.tools = has(chat_template, kHermesTools) && !has(chat_template, "### Tools");
  options.thinks = has(chat_template, "</think>");
  options.keeps_thoughts = has(chat_template, "reasoning_content");
  options.has_switch = has(chat_template, "enable_thinking");
  options.opens_thought = has(chat_template, "<|im_start|>assistant\\n<think>\\n'") ||
                          has(chat_template, "<|im_start|>assistant\\n<think>\\n\"");
  if (options.tools || options.thinks) return make_qwen(tokenizer, std::move(options));
  return make_chatml(tokenizer, std::move(options.default_system));
}

std::unique_ptr<ChatFormat> by_template(const Tokenizer& tokenizer, std::string_view chat_template) {
  if (has(chat_template, "<|im_start|>") && has(chat_template, "<|im_end|>"))
    return chatml_family(tokenizer, chat_template);
  if (has(chat_template, "<|start_header_id|>") && has(chat_template, "<|eot_id|>")) {
    return make_llama3(tokenizer, {.dates = has(chat_template, "Cutting Knowledge Date"),
                                   .tools = has(chat_template, "Given the following functions")});
  }
  if (has(chat_template, "<start_of_turn>") && has(chat_template, "<end_of_turn>"))
    return make_gemma(tokenizer, {.system = !has(chat_template, "System role not supported")});
  if (has(chat_template, "<|start|>") && has(chat_template, "<|channel|>")) return make_harmony(tokenizer);
  return nullptr;
}

std::unique_ptr<ChatFormat> by_tokens(const Tokenizer& tokenizer, std::string_view architecture) {
  if (tokenizer.id_of("<|im_start|>") && tokenizer.id_of("<|im_end|>")) {
    if (architecture == "qwen3")
      return make_qwen(tokenizer, {.thinks = true, .keeps_thoughts = true, .has_switch = true});
    return make_chatml(tokenizer, {});
  }
  if (tokenizer.id_of("<|start_header_id|>")) return make_llama3(tokenizer, {});
  if (tokenizer.id_of("<start_of_turn>")) return make_gemma(tokenizer, {});
  if (tokenizer.id_of("<|start|>") && tokenizer.id_of("<|channel|>")) return make_harmony(tokenizer);
  return nullptr;
}

std::string one_line_start(std::string_view text) {
  std::string start(text.substr(0, 60));
  for (char& c : start) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return start + (text.size() > 60 ? "..." : "");
}

}  // namespace

std::unique_ptr<ChatFormat> find_chat_format(const Tokenizer& tokenizer, std::string_view chat_template,
                                             std::string_view architecture) {
  auto format =
      chat_template.empty() ? by_tokens(tokenizer, architecture) : by_template(tokenizer, chat_template);
  if (format) return format;
  const std::string what =
      chat_template.empty()
          ? fmt::format("the {} model has no chat template, and its tokenizer no tokens of a known one",
                        architecture)
          : fmt::format("the chat template of the {} model is not known: '{}'", architecture,
                        one_line_start(chat_template));
  throw Error(ErrorCode::unsupported, what,
              "known are ChatML, Qwen, Llama 3, Gemma and harmony; write the model's format into a plain "
              "prompt instead");
}

}  // namespace basin::text
