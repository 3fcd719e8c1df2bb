// Tools as harmony describes them to the model: declarations of TypeScript.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

namespace basin::text {

/// A JSON schema as a type. `indent` stands before every line but the first.
std::string typescript_type(const nlohmann::ordered_json& schema, const std::string& indent);

/// "# Tools", the namespace "functions" and its members. `tools` as in ChatOptions. Throws Error(invalid_argument).
std::string harmony_tools(std::span<const std::string> tools);

}  // namespace basin::text
