// What tests of chat formats share: a tokenizer with the wanted special tokens, rendering to text, and a parsed answer.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "text/chat.h"
#include "text/tokenizer.h"
#include "text/utf8.h"
#include "weights/gguf.h"

namespace basin::text {

/// A byte-level tokenizer without merges: 256 bytes by their value, then `special` tokens, then `plain` ones that every
/// text may become (as Qwen's <think>).
inline Tokenizer byte_tokenizer(const std::vector<std::string>& special,
                                const std::vector<std::string>& plain = {}, const std::string& bos = {}) {
  std::vector<std::string> tokens;
  std::vector<std::int64_t> types(256, 1);
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(spelling_of_byte(static_cast<std::uint8_t>(byte)));
  for (const std::string& token : special) {
    tokens.push_back(token);
    types.push_back(3);
  }
  for (const std::string& token : plain) {
    tokens.push_back(token);
    types.push_back(4);
  }
  weights::GgufFile file;
  file.metadata["tokenizer.ggml.model"] = std::string("gpt2");
  file.metadata["tokenizer.ggml.pre"] = std::string("gpt-2");
  file.metadata["tokenizer.ggml.tokens"] = tokens;
  file.metadata["tokenizer.ggml.token_type"] = types;
  const auto found = std::find(tokens.begin(), tokens.end(), bos);
  if (found != tokens.end())
    file.metadata["tokenizer.ggml.bos_token_id"] = static_cast<std::uint64_t>(found - tokens.begin());
  file.metadata["tokenizer.ggml.merges"] = std::vector<std::string>{};
  return Tokenizer::from_gguf(file);
}

/// The text of ids with control tokens in guillemets, so that they are told from text that spells them.
inline std::string marked(const Tokenizer& tokenizer, std::span<const std::int32_t> ids) {
  std::string text;
  for (const std::int32_t id : ids) {
    const std::string bytes = tokenizer.token_bytes(id, true);
    text += id < 256 ? bytes : "\u00ab" + bytes + "\u00bb";
  }
  return text;
}

/// "content(Hi) reasoning(..) call0(name) args0({})": neighbours of one kind are joined.
inline std::string parsed(const Tokenizer& tokenizer, ChatParser& parser, std::string_view answer,
                          bool parse_special = true) {
  std::vector<ChatDelta> joined;
  const auto add = [&](const std::vector<ChatDelta>& deltas) {
    for (const ChatDelta& delta : deltas) {
      const bool joins = !joined.empty() && joined.back().kind == delta.kind &&
                         joined.back().index == delta.index && delta.kind != ChatDelta::tool_call;
      joins ? void(joined.back().text += delta.text) : joined.push_back(delta);
    }
  };
  for (const std::int32_t id : tokenizer.encode(answer, parse_special)) add(parser.push(id));
  add(parser.finish());
  std::string text;
  for (const ChatDelta& delta : joined) {
    static constexpr const char* kNames[] = {"content", "reasoning", "call", "args"};
    const bool call = delta.kind >= ChatDelta::tool_call;
    text += fmt::format("{}{}{}({})", text.empty() ? "" : " ", kNames[delta.kind],
                        call ? std::to_string(delta.index) : std::string(), delta.text);
  }
  return text;
}

}  // namespace basin::text
