// Reads the JSON that a server sent, which may be anything.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace basin::cli {

/// The string at `pointer` ("/choices/0/text"); nothing when there is none.
std::optional<std::string> string_at(const nlohmann::json& reply, const char* pointer);

/// Likewise a whole number that is not negative.
std::optional<std::int64_t> count_at(const nlohmann::json& reply, const char* pointer);

/// What the server says went wrong; nothing when it says nothing of that kind. May be long, and have any characters.
std::optional<std::string> error_of(const nlohmann::json& reply);

}  // namespace basin::cli
