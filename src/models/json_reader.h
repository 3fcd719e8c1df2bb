// Typed access to config.json. What it says is hostile until checked; every error names the file and the key.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace basin::models {

/// Largest value any count of a configuration may have: it keeps products of two of them inside int64.
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

class JsonReader {
 public:
  /// `object` must outlive the reader; `where` names it in messages.
  JsonReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

  // Each throws Error(corrupt) when the value is absent, or is none of its kind.
  std::int64_t count(const char* key) const;  // an integer from 1 to kMaxCount
  double number(const char* key) const;
  JsonReader section(const char* key) const;  // an object

  std::int64_t count_or(const char* key, std::int64_t otherwise) const;
  double number_or(const char* key, double otherwise) const;
  double positive_or(const char* key, double otherwise) const;
  bool flag_or(const char* key, bool otherwise) const;
  std::string text_or(const char* key, const std::string& otherwise) const;

  // Each throws Error(unsupported) when the key is present, not null, and ...
  void refuse_unless_null(const char* key) const;
  void refuse_true(const char* key) const;
  void refuse_false(const char* key) const;

  /// Error(unsupported): what was found and what is supported.
  [[noreturn]] void refuse(const std::string& found, const std::string& supported) const;

  /// A value as messages show it: short, ASCII.
  static std::string shown(const nlohmann::json& value);
  std::string shown(const char* key) const { return shown(object_[key]); }

  const nlohmann::json& object() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace basin::models
