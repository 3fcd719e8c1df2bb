// The formats that find_chat_format() chooses from. Each throws Error(unsupported) when the tokenizer lacks its tokens.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "text/chat.h"

namespace basin::text {

/// <|im_start|>role ... <|im_end|>, no tools. `default_system` may be empty.
std::unique_ptr<ChatFormat> make_chatml(const Tokenizer& tokenizer, std::string default_system);

struct QwenOptions {
  std::string default_system = {};  // may be empty
  bool tools = true;                // the template has Hermes' form of them
  bool thinks = false;              // <think> stands in answers, and old thoughts are dropped
  bool keeps_thoughts = false;  // those after the user's last question stay, with the calls that they led to
  bool has_switch = false;      // an empty thought in the opened turn keeps the model from thinking
  bool opens_thought = false;   // the opened turn ends with <think>
};
/// ChatML with Hermes' <tool_call> and, from Qwen3 on, <think>.
std::unique_ptr<ChatFormat> make_qwen(const Tokenizer& tokenizer, QwenOptions options);

struct Llama3Options {
  bool dates = false;  // from 3.1 on: a system message with dates comes first
  bool tools = false;  // and tools are known
};
std::unique_ptr<ChatFormat> make_llama3(const Tokenizer& tokenizer, Llama3Options options);

struct GemmaOptions {
  bool system = true;  // Gemma 3 puts a system message before the user's first words; Gemma 2 has none
};
std::unique_ptr<ChatFormat> make_gemma(const Tokenizer& tokenizer, GemmaOptions options);

std::unique_ptr<ChatFormat> make_harmony(const Tokenizer& tokenizer);

}  // namespace basin::text
