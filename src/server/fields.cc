#include "server/fields.h"

#include <fmt/format.h>

namespace basin::server {
namespace {

using nlohmann::json;

// What a value looks like in a message: short, whatever it is.
std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

}  // namespace

json parse_object(const std::string& body) {
  constexpr int kMaxDepth = 100;  // copying and writing a value are recursive
  bool too_deep = false;
  const json::parser_callback_t see = [&](int depth, json::parse_event_t, json&) {
    too_deep = too_deep || depth > kMaxDepth;
    return !too_deep;
  };
  json object = json::parse(body, see, false);
  if (too_deep)
    throw ApiError(400, fmt::format("the body nests deeper than {} levels", kMaxDepth), {}, "invalid_json");
  if (object.is_discarded()) throw ApiError(400, "the body is not JSON (in UTF-8)", {}, "invalid_json");
  if (!object.is_object()) throw ApiError(400, "the body must be a JSON object", {}, "invalid_json");
  return object;
}

nlohmann::ordered_json parse_ordered(const std::string& body) {
  constexpr std::size_t kMostKeys = 4096;  // looking one up takes as long as there are keys
  std::size_t keys = 0;
  const json::parser_callback_t count = [&](int, json::parse_event_t event, json&) {
    keys += event == json::parse_event_t::key;
    return keys <= kMostKeys;
  };
  [[maybe_unused]] const json counted = json::parse(body, count, false);
  if (keys > kMostKeys) throw ApiError(400, fmt::format("the body has more than {} keys", kMostKeys));
  return nlohmann::ordered_json::parse(body);
}

void Fields::fail(const char* name, const std::string& what) const {
  throw ApiError(400, fmt::format("{}{} {}", prefix_, name, what), prefix_ + name);
}

const json* Fields::get(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool Fields::is_null(const char* name) const {
  const auto found = object_.find(name);
  return found != object_.end() && found->is_null();
}

std::optional<std::int64_t> Fields::integer(const char* name, std::int64_t low, std::int64_t high) const {
  const json* value = get(name);
  if (value == nullptr) return {};
  const std::string allowed = high == std::numeric_limits<std::int64_t>::max()
                                  ? fmt::format("{} or more", low)
                                  : fmt::format("{} to {}", low, high);
  const bool fits =
      value->is_number_integer() &&
      (!value->is_number_unsigned() ||
       value->get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!fits || value->get<std::int64_t>() < low || value->get<std::int64_t>() > high)
    fail(name, fmt::format("is {}; it must be a whole number, {}", shown(*value), allowed));
  return value->get<std::int64_t>();
}

std::optional<double> Fields::number(const char* name) const {
  const json* value = get(name);
  if (value == nullptr) return {};
  if (!value->is_number()) fail(name, fmt::format("is {}; it must be a number", shown(*value)));
  return value->get<double>();
}

std::optional<bool> Fields::boolean(const char* name) const {
  const json* value = get(name);
  if (value == nullptr) return {};
  if (!value->is_boolean()) fail(name, fmt::format("is {}; it must be true or false", shown(*value)));
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const char* name) const {
  const json* value = get(name);
  if (value == nullptr) return {};
  if (!value->is_string()) fail(name, fmt::format("is {}; it must be a string", shown(*value)));
  return value->get<std::string>();
}

std::vector<std::string> Fields::strings(const char* name) const {
  const json* value = get(name);
  if (value == nullptr) return {};
  if (value->is_string()) return {value->get<std::string>()};
  if (!value->is_array())
    fail(name, fmt::format("is {}; it must be a string or a list of strings", shown(*value)));
  std::vector<std::string> strings;
  for (const json& entry : *value) {
    if (!entry.is_string()) fail(name, fmt::format("has {}; its entries must be strings", shown(entry)));
    strings.push_back(entry.get<std::string>());
  }
  return strings;
}

std::vector<std::int32_t> Fields::token_ids(const char* name) const {
  const json* value = get(name);
  return value == nullptr ? std::vector<std::int32_t>{} : to_token_ids(*value, prefix_ + name);
}

void Fields::refuse(const char* name, std::initializer_list<json> harmless) const {
  const json* value = get(name);
  if (value == nullptr) return;
  for (const json& nothing : harmless) {
    if (*value == nothing) return;
  }
  fail(name, fmt::format("is {}, and is not supported here", shown(*value)));
}

std::vector<std::int32_t> to_token_ids(const json& value, const std::string& name) {
  if (!value.is_array())
    throw ApiError(400, fmt::format("{} is {}; it must be a list of token ids", name, shown(value)), name);
  std::vector<std::int32_t> ids;
  ids.reserve(value.size());
  for (const json& entry : value) {
    const bool fits = entry.is_number_unsigned() && entry.get<std::uint64_t>() <= 0x7fffffff;
    if (!fits)
      throw ApiError(400, fmt::format("{} has {}; a token id is a whole number from 0", name, shown(entry)),
                     name);
    ids.push_back(entry.get<std::int32_t>());
  }
  return ids;
}

}  // namespace basin::server
