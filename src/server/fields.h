// Reads the fields of a JSON object that a client sent; whatever is wrong with one is an ApiError naming it.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "server/api_error.h"

namespace basin::server {

/// `body` as a JSON object. Throws ApiError(400).
nlohmann::json parse_object(const std::string& body);
/// The same of a body that parse_object() took, with keys in the order in which they were sent. Throws ApiError(400) when there
/// are so many that an ordered object would take its time.
nlohmann::ordered_json parse_ordered(const std::string& body);

class Fields {
 public:
  /// `object` must outlive the fields. `prefix` opens their names in messages ("stream_options.").
  explicit Fields(const nlohmann::json& object, std::string prefix = {})
      : object_(object), prefix_(std::move(prefix)) {}

  /// Null when the field is missing or null.
  const nlohmann::json* get(const char* name) const;
  /// Whether it is there and null.
  bool is_null(const char* name) const;

  std::optional<std::int64_t> integer(const char* name, std::int64_t low,
                                      std::int64_t high = std::numeric_limits<std::int64_t>::max()) const;
  std::optional<double> number(const char* name) const;
  std::optional<bool> boolean(const char* name) const;
  std::optional<std::string> string(const char* name) const;
  /// One string, or a list of them.
  std::vector<std::string> strings(const char* name) const;
  std::vector<std::int32_t> token_ids(const char* name) const;

  /// Throws ApiError(400) when the field is there and means more than `harmless` (a value that asks for nothing).
  void refuse(const char* name, std::initializer_list<nlohmann::json> harmless = {}) const;

  [[noreturn]] void fail(const char* name, const std::string& what) const;

 private:
  const nlohmann::json& object_;
  std::string prefix_;
};

/// `value` as token ids. Throws ApiError(400) naming `name`.
std::vector<std::int32_t> to_token_ids(const nlohmann::json& value, const std::string& name);

}  // namespace basin::server
