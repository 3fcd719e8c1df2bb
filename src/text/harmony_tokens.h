// The control tokens of harmony, and the parser of what a model writes with them.
#pragma once

#include <cstdint>
#include <memory>

#include "text/chat.h"

namespace basin::text {

struct HarmonyTokens {
  /// Throws Error(unsupported) naming the token that the tokenizer lacks.
  explicit HarmonyTokens(const Tokenizer& tokenizer);

  std::int32_t start, end, message, channel, constrain, call, done;
};

/// Final and commentary are content, analysis is reasoning, and a message to a function is a call. Malformed headers mean
/// what can be made of them: parts in any order, doubled, or left out; messages that do not end or do not begin. Messages
/// in the name of others than the assistant are left out.
std::unique_ptr<ChatParser> make_harmony_parser(const Tokenizer& tokenizer, const HarmonyTokens& tokens);

}  // namespace basin::text
