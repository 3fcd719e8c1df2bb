// Any answer of a model is read without an error, and any content of a message stays text. The first byte chooses the
// format, the second its options; bytes that UTF-8 does not have stand for control tokens.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "text/chat.h"
#include "text/chat_cases.h"

namespace {

using basin::fuzz::require;
using basin::text::ChatDelta;
using basin::text::ChatFormat;
using basin::text::ChatOptions;
using basin::text::Message;
using basin::text::Tokenizer;

constexpr unsigned char kFirstControl = 0xf5;

const Tokenizer& tokenizer() {
  static const Tokenizer made = basin::text::byte_tokenizer(
      {"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
       "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>",
       "<start_of_turn>", "<end_of_turn>"},
      {"<think>", "</think>", "<tool_call>", "</tool_call>"});
  return made;
}

// Of each format, without what its template would say.
const ChatFormat& format(unsigned char choice) {
  static const std::array<std::unique_ptr<ChatFormat>, 6> all = {
      basin::text::find_chat_format(tokenizer(), "<|start|><|channel|>", "gpt-oss"),
      basin::text::find_chat_format(
          tokenizer(),
          "<|im_start|><|im_end|></think>enable_thinking # Tools\\n\\nYou may call one or "
          "more functions",
          "qwen3"),
      basin::text::find_chat_format(
          tokenizer(), "<|im_start|><|im_end|></think><|im_start|>assistant\\n<think>\\n'", "qwen3"),
      basin::text::find_chat_format(
          tokenizer(), "<|start_header_id|><|eot_id|>Cutting Knowledge Date Given the following functions",
          "llama"),
      basin::text::find_chat_format(tokenizer(), "<start_of_turn><end_of_turn>", "gemma3"),
      basin::text::find_chat_format(tokenizer(), "<|im_start|><|im_end|>", "llama")};
  return *all[choice % all.size()];
}

ChatOptions options_of(unsigned char choice) {
  ChatOptions options;
  if ((choice & 1) != 0) options.tools = {R"({"type": "function", "function": {"name": "f"}})"};
  return options;
}

void read_answer(const ChatFormat& chat, const ChatOptions& options, std::string_view bytes) {
  const auto parser = chat.parser(options);
  std::int32_t calls = 0;
  const auto check = [&](const std::vector<ChatDelta>& deltas) {
    for (const ChatDelta& delta : deltas) {
      require(!delta.text.empty() && !basin::text::first_invalid_utf8(delta.text));
      if (delta.kind == ChatDelta::tool_call) require(delta.index == calls++);
      if (delta.kind == ChatDelta::tool_arguments) require(delta.index == calls - 1);
    }
  };
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    check(parser->push(byte < kFirstControl ? byte : 256 + byte - kFirstControl));
  }
  check(parser->finish());
}

std::size_t control_tokens(const std::vector<std::int32_t>& ids) {
  return static_cast<std::size_t>(
      std::count_if(ids.begin(), ids.end(), [](std::int32_t id) { return id >= 256 && id < 270; }));
}

void write_message(const ChatFormat& chat, ChatOptions options, std::string_view bytes) {
  const std::string content(bytes);
  if (basin::text::first_invalid_utf8(content)) return;
  if (chat.name() == "gemma" || chat.name() == "chatml") options.tools.clear();
  if (chat.name() == "qwen") options.tools.clear();  // one of the two has none
  const std::vector<Message> given = {{"user", content}}, plain = {{"user", "x"}};
  require(control_tokens(chat.render(given, options)) == control_tokens(chat.render(plain, options)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  const ChatFormat& chat = format(data[0]);
  const ChatOptions options = options_of(data[1]);
  read_answer(chat, options, rest);
  write_message(chat, options, rest);
  return 0;
}
