// JSON in chats, written as templates write it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace basin::text {

/// Nothing for what is not JSON or nested more than 64 levels deep.
std::optional<nlohmann::ordered_json> parse_json(std::string_view text);

/// With a space after each comma and colon and letters as they are: Python's json.dumps(..., ensure_ascii=False).
std::string python_json(const nlohmann::ordered_json& value);

/// A tool of ChatOptions. Throws Error(invalid_argument) when it is no object, or has no function with a name.
nlohmann::ordered_json read_tool(std::string_view tool);

}  // namespace basin::text
