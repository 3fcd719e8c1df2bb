#include "text/chat_json.h"

#include <fmt/format.h>

#include "basin/base/error.h"

namespace basin::text {

using Json = nlohmann::ordered_json;

std::optional<Json> parse_json(std::string_view text) {
  constexpr int kMaxDepth = 64;  // writing it is recursive
  bool too_deep = false;
  const auto see = [&](int depth, Json::parse_event_t, const Json&) {
    too_deep = too_deep || depth > kMaxDepth;
    return !too_deep;
  };
  Json value = Json::parse(text, see, false);
  return too_deep || value.is_discarded() ? std::nullopt : std::optional(std::move(value));
}

std::string python_json(const Json& value) {
  if (value.is_object()) {
    std::string out = "{";
    for (const auto& [key, member] : value.items()) {
      out += fmt::format("{}{}: {}", out.size() > 1 ? ", " : "", Json(key).dump(), python_json(member));
    }
    return out + "}";
  }
  if (value.is_array()) {
    std::string out = "[";
    for (const Json& member : value) out += (out.size() > 1 ? ", " : "") + python_json(member);
    return out + "]";
  }
  return value.dump();
}

Json read_tool(std::string_view tool) {
  const auto refuse = [&](const char* what) {
    return Error(ErrorCode::invalid_argument, fmt::format("tool {}: {}", tool.substr(0, 100), what),
                 R"(a tool is {"type": "function", "function": {"name": ..., "parameters": ...}})");
  };
  auto object = parse_json(tool);
  if (!object || !object->is_object()) throw refuse("no JSON object");
  const auto function = object->find("function");
  if (function == object->end() || !function->is_object()) throw refuse("no 'function'");
  const auto name = function->find("name");
  if (name == function->end() || !name->is_string() || name->get<std::string>().empty())
    throw refuse("no 'function.name'");
  return std::move(*object);
}

}  // namespace basin::text
