#include "text/chat_template.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "basin/base/error.h"
#include "text/tokenizer.h"
#include "weights/json_file.h"
#include "weights/weights.h"

namespace basin::text {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxTemplateBytes = 1u << 20;
constexpr std::uint64_t kMaxConfigBytes = 64u << 20;

// The text of a literal's part: Jinja's escapes resolved. Nothing for what Basin does not know.
std::optional<std::string> unescape(std::string_view literal) {
  std::string text;
  for (std::size_t i = 0; i < literal.size(); ++i) {
    if (literal[i] != '\\') {
      text += literal[i];
      continue;
    }
    if (++i == literal.size()) return {};
    switch (literal[i]) {
      case 'n':
        text += '\n';
        break;
      case 't':
        text += '\t';
        break;
      case '\\':
      case '\'':
      case '"':
        text += literal[i];
        break;
      default:
        return {};
    }
  }
  return text;
}

// The message behind an opening of a system turn, when the turn ends inside the same literal, or, with `quote` 0, inside
// the same stretch of plain text. Nothing when code puts the message together.
std::optional<std::string> message_at(std::string_view rest, char quote) {
  const std::string_view newline = quote == 0 || rest.starts_with('\n') ? "\n" : "\\n";
  const std::size_t end = rest.find("<|im_end|>");
  if (!rest.starts_with(newline) || end == std::string_view::npos) return {};
  const std::string_view message = rest.substr(newline.size(), end - newline.size());
  if (quote == 0) {
    const bool plain =
        message.find("{{") == std::string_view::npos && message.find("{%") == std::string_view::npos;
    return plain ? std::optional(std::string(message)) : std::nullopt;
  }
  for (std::size_t i = 0; i < message.size(); ++i) {
    if (message[i] == '\\') {
      ++i;
    } else if (message[i] == quote) {
      return {};
    }
  }
  return unescape(message);
}

std::string read_file(const std::filesystem::path& path) {
  const weights::MappedFile file(path);
  std::string text(reinterpret_cast<const char*>(file.data()), file.size());
  if (file.size() > kMaxTemplateBytes || first_invalid_utf8(text))
    throw Error(ErrorCode::corrupt, fmt::format("{} is no chat template: longer than {} bytes, or not UTF-8",
                                                path.string(), kMaxTemplateBytes));
  return text;
}

}  // namespace

std::string default_system(std::string_view chat_template) {
  constexpr std::string_view kOpen = "<|im_start|>system";
  for (std::size_t at = chat_template.find(kOpen); at != std::string_view::npos;
       at = chat_template.find(kOpen, at + 1)) {
    const char before = at == 0 ? '\n' : chat_template[at - 1];
    const char quote = before == '\'' || before == '"' ? before : '\0';
    if (auto message = message_at(chat_template.substr(at + kOpen.size()), quote)) return *message;
  }
  return {};
}

std::string read_chat_template(const std::filesystem::path& directory) {
  std::error_code ignored;
  const std::filesystem::path own = directory / "chat_template.jinja";
  if (std::filesystem::exists(own, ignored)) return read_file(own);
  const std::filesystem::path path = directory / "tokenizer_config.json";
  if (!std::filesystem::exists(path, ignored)) return {};
  const json config = weights::read_json_object(path, kMaxConfigBytes);
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  if (found->is_array()) {
    for (const json& entry : *found) {
      if (entry.is_object() && entry.value("name", json()) == "default" &&
          entry.value("template", json()).is_string())
        return entry["template"].get<std::string>();
    }
    return {};
  }
  throw Error(ErrorCode::corrupt,
              fmt::format("{}: 'chat_template' is neither a text nor a list", path.string()));
}

}  // namespace basin::text
