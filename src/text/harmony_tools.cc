#include "text/harmony_tools.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "text/chat_json.h"

namespace basin::text {
namespace {

using Json = nlohmann::ordered_json;

const Json& member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::optional<std::string> text_of(const Json& object, const char* key) {
  const Json& value = member(object, key);
  return value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt;
}

bool is_enum(const Json& schema) {
  return member(schema, "enum").is_array() && !member(schema, "enum").empty();
}

/// "default: 3", with quotes around text that is no member of an enum. Empty without a default.
std::string default_of(const Json& schema, bool quotes_enum_members = false) {
  if (!schema.is_object() || !schema.contains("default")) return {};
  const Json& value = schema["default"];
  if (!value.is_string()) return "default: " + value.dump();
  const bool quoted = !is_enum(schema) || quotes_enum_members;
  return fmt::format("default: {}{}{}", quoted ? "\"" : "", value.get<std::string>(), quoted ? "\"" : "");
}

std::string or_null(std::string type, const Json& schema) {
  const Json& nullable = member(schema, "nullable");
  const bool adds = nullable.is_boolean() && nullable.get<bool>() && type.find("null") == std::string::npos;
  return adds ? type + " | null" : type;
}

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

std::string comment_after(const std::vector<std::string>& parts) {
  std::vector<std::string> said;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(said),
               [](const auto& p) { return !p.empty(); });
  return said.empty() ? std::string() : " // " + joined(said, " ");
}

std::string variants(const Json& one_of, const std::string& indent) {
  std::string out;
  for (const Json& variant : one_of) {
    out += fmt::format("\n{} | {}", indent, or_null(typescript_type(variant, indent + "   "), variant));
    out += comment_after({text_of(variant, "description").value_or(""), default_of(variant, true)});
  }
  return out;
}

std::string several_types(const Json& types) {
  std::vector<std::string> names;
  for (const Json& type : types) {
    if (type.is_string()) names.push_back(type == "integer" ? "number" : type.get<std::string>());
  }
  return joined(names, " | ");
}

std::string lines_before(const Json& property, const std::string& indent) {
  std::string out;
  if (const auto title = text_of(property, "title")) out += fmt::format("{0}// {1}\n{0}//\n", indent, *title);
  if (const auto description = text_of(property, "description");
      description && member(property, "oneOf").is_null())
    out += fmt::format("{}// {}\n", indent, *description);
  const Json& examples = member(property, "examples");
  if (!examples.is_array() || examples.empty()) return out;
  out += indent + "// Examples:\n";
  for (const Json& example : examples) {
    if (example.is_string()) out += fmt::format("{}// - \"{}\"\n", indent, example.get<std::string>());
  }
  return out;
}

/// A property that is one of several types, each on a line of its own.
std::string choice(const std::string& name, const Json& property, const std::string& indent) {
  const Json& one_of = member(property, "oneOf");
  const auto description = text_of(property, "description");
  const bool repeats = description && !one_of.empty() && text_of(one_of[0], "description") == description;
  const bool described = description && !repeats;
  std::string out;
  if (described) out += fmt::format("{}// {}\n", indent, *description);
  if (const std::string value = default_of(property); !value.empty())
    out += fmt::format("{}// {}\n", indent, value);
  out += fmt::format("{}{}:\n", indent, name);
  bool first = true;
  for (const Json& variant : one_of) {
    std::string said = text_of(variant, "description").value_or("");
    if (said == description || (first && described)) said.clear();
    first = false;
    out += fmt::format("{} | {}{}\n", indent, or_null(typescript_type(variant, indent + "   "), variant),
                       comment_after({said, default_of(variant)}));
  }
  return out + indent + ",\n";
}

std::string object_type(const Json& schema, const std::string& indent) {
  std::string out;
  if (const auto description = text_of(schema, "description"))
    out += fmt::format("{}// {}\n", indent, *description);
  out += "{\n";
  const Json& properties = member(schema, "properties");
  const Json& required = member(schema, "required");
  if (properties.is_object()) {
    for (const auto& [key, property] : properties.items()) {
      const bool needed =
          required.is_array() && std::find(required.begin(), required.end(), key) != required.end();
      const std::string name = key + (needed ? "" : "?");
      out += lines_before(property, indent);
      if (member(property, "oneOf").is_array()) {
        out += choice(name, property, indent);
        continue;
      }
      const bool chooses = !member(property, "oneOf").is_null();
      out += fmt::format("{}{}: {},{}\n", indent, name,
                         or_null(typescript_type(property, indent + "    "), property),
                         chooses ? std::string() : comment_after({default_of(property)}));
    }
  }
  return out + indent + "}";
}

std::string string_type(const Json& schema) {
  std::vector<std::string> members;
  if (is_enum(schema)) {
    for (const Json& value : schema["enum"]) {
      if (value.is_string()) members.push_back(fmt::format("\"{}\"", value.get<std::string>()));
    }
  }
  return members.empty() ? "string" : joined(members, " | ");
}

std::string commented_lines(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    if (end < text.size() && line.ends_with('\r')) line.remove_suffix(1);
    out += fmt::format("// {}\n", line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace

std::string typescript_type(const Json& schema, const std::string& indent) {
  if (const Json& one_of = member(schema, "oneOf"); one_of.is_array()) return variants(one_of, indent);
  const Json& type = member(schema, "type");
  if (type.is_array()) {
    if (std::string types = several_types(type); !types.empty()) return types;
  }
  if (!type.is_string()) return "any";
  if (type == "object") return object_type(schema, indent);
  if (type == "string") return string_type(schema);
  if (type == "number" || type == "integer") return "number";
  if (type == "boolean") return "boolean";
  if (type != "array") return "any";
  const Json& items = member(schema, "items");
  return schema.contains("items") ? typescript_type(items, indent) + "[]" : "Array<any>";
}

std::string harmony_tools(std::span<const std::string> tools) {
  std::string out = "# Tools\n\n## functions\n\nnamespace functions {\n\n";
  for (const std::string& tool : tools) {
    const Json function = read_tool(tool)["function"];
    out += commented_lines(text_of(function, "description").value_or(""));
    const Json& parameters = member(function, "parameters");
    out += fmt::format("type {} = ({}) => any;\n\n", function["name"].get<std::string>(),
                       parameters.is_null() ? "" : "_: " + typescript_type(parameters, ""));
  }
  return out + "} // namespace functions";
}

}  // namespace basin::text
