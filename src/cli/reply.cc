#include "cli/reply.h"

#include <limits>
#include <nlohmann/json.hpp>

namespace basin::cli {
namespace {

using nlohmann::json;

// Null when it is not there.
const json* find(const json& reply, const char* pointer) {
  const json::json_pointer path(pointer);
  return reply.is_structured() && reply.contains(path) ? &reply.at(path) : nullptr;
}

}  // namespace

std::optional<std::string> string_at(const json& reply, const char* pointer) {
  const json* found = find(reply, pointer);
  if (found == nullptr || !found->is_string()) return {};
  return found->get<std::string>();
}

std::optional<std::int64_t> count_at(const json& reply, const char* pointer) {
  const json* found = find(reply, pointer);
  if (found == nullptr || !found->is_number_unsigned()) return {};
  const auto count = found->get<std::uint64_t>();
  if (count > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return {};
  return static_cast<std::int64_t>(count);
}

std::optional<std::string> error_of(const json& reply) {
  const json* error = reply.is_object() ? find(reply, "/error") : nullptr;
  if (error == nullptr || error->is_null()) return {};
  if (error->is_string()) return error->get<std::string>();
  if (const auto message = string_at(reply, "/error/message")) return message;
  return error->dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace basin::cli
