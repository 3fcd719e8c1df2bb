#include <fmt/format.h>

#include "basin/base/error.h"
#include "text/tokenizer.h"

namespace basin::text {

std::vector<std::int32_t> chatml(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::string_view default_system) {
  const auto start = tokenizer.id_of("<|im_start|>"), end = tokenizer.id_of("<|im_end|>");
  if (!start || !end) {
    throw Error(ErrorCode::unsupported,
                "the tokenizer has no <|im_start|> and <|im_end|>, which ChatML needs",
                "use a plain prompt instead of a chat");
  }
  std::vector<std::int32_t> ids;
  // Each part is encoded on its own, since the special tokens separate them in the rendered template as well.
  const auto put = [&](std::string_view text) {
    const auto part = tokenizer.encode(text, false);
    ids.insert(ids.end(), part.begin(), part.end());
  };
  const auto turn = [&](std::string_view role, std::string_view content) {
    ids.push_back(*start);
    put(fmt::format("{}\n{}", role, content));
    ids.push_back(*end);
    put("\n");
  };
  bool has_system = false;
  for (const Message& message : messages) has_system = has_system || message.role == "system";
  if (!has_system && !default_system.empty()) turn("system", default_system);
  for (const Message& message : messages) turn(message.role, message.content);
  ids.push_back(*start);
  put("assistant\n");
  return ids;
}

}  // namespace basin::text
