#include "models/json_reader.h"

#include <fmt/format.h>

#include <cmath>

#include "basin/base/error.h"

namespace basin::models {

using nlohmann::json;

std::string JsonReader::shown(const json& value) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= 120 ? text : text.substr(0, 120) + "...";
}

std::int64_t JsonReader::count(const char* key) const {
  if (!has(key)) throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}'", where_, key));
  const json& value = object_[key];
  // A number that is written 64.0 is not a count.
  if (!value.is_number_integer() || value.get<double>() < 1 ||
      value.get<double>() > static_cast<double>(kMaxCount)) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}' is {}; allowed is an integer from 1 to {}", where_,
                                                key, shown(value), kMaxCount));
  }
  return value.get<std::int64_t>();
}

double JsonReader::number(const char* key) const {
  if (!has(key)) throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}'", where_, key));
  if (!object_[key].is_number())
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: '{}' is {}; it must be a number", where_, key, shown(key)));
  return object_[key].get<double>();
}

JsonReader JsonReader::section(const char* key) const {
  if (!has(key)) throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}'", where_, key));
  if (!object_[key].is_object())
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}' must be an object", where_, key));
  return {object_[key], fmt::format("{}: {}", where_, key)};
}

std::int64_t JsonReader::count_or(const char* key, std::int64_t otherwise) const {
  return has(key) ? count(key) : otherwise;
}

double JsonReader::number_or(const char* key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}

double JsonReader::positive_or(const char* key, double otherwise) const {
  if (!has(key)) return otherwise;
  const double value = number(key);
  if (!(value > 0) || !std::isfinite(static_cast<float>(value)))
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: '{}' is {}; it must be positive", where_, key, shown(key)));
  return value;
}

bool JsonReader::flag_or(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  if (!object_[key].is_boolean())
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: '{}' is {}; it must be true or false", where_, key, shown(key)));
  return object_[key].get<bool>();
}

std::string JsonReader::text_or(const char* key, const std::string& otherwise) const {
  if (!has(key)) return otherwise;
  if (!object_[key].is_string())
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: '{}' is {}; it must be a string", where_, key, shown(key)));
  return object_[key].get<std::string>();
}

void JsonReader::refuse_unless_null(const char* key) const {
  if (has(key))
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: '{}' = {} is not supported", where_, key, shown(key)));
}

void JsonReader::refuse_true(const char* key) const {
  if (has(key) && object_[key] != false)
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: '{}' = {} is not supported", where_, key, shown(key)));
}

void JsonReader::refuse_false(const char* key) const {
  if (has(key) && object_[key] != true) refuse(fmt::format("'{}' = {}", key, shown(key)), "true");
}

void JsonReader::refuse(const std::string& found, const std::string& supported) const {
  throw Error(ErrorCode::unsupported,
              fmt::format("{}: {} is not supported; supported is {}", where_, found, supported));
}

}  // namespace basin::models
