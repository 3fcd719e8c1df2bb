#include "models/gguf_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"
#include "models/json_reader.h"

namespace basin::models {

const weights::GgufValue* GgufReader::find(const std::string& key) {
  used_.insert(prefix_ + key);
  const auto it = file_.metadata.find(prefix_ + key);
  return it == file_.metadata.end() ? nullptr : &it->second;
}

std::int64_t GgufReader::count(const std::string& key) {
  const auto* value = find(key);
  if (value == nullptr)
    throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}{}'", where_, prefix_, key));
  std::int64_t result = 0;
  if (const auto* i = std::get_if<std::int64_t>(value))
    result = *i;
  else if (const auto* u = std::get_if<std::uint64_t>(value))
    result = static_cast<std::int64_t>(std::min<std::uint64_t>(*u, std::uint64_t{1} << 62));
  else if (std::holds_alternative<std::vector<std::int64_t>>(*value))
    throw Error(
        ErrorCode::unsupported,
        fmt::format("{}: '{}{}' differs from layer to layer, which is not supported", where_, prefix_, key));
  if (result < 1 || result > kMaxCount) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: '{}{}' must be an integer from 1 to {}", where_, prefix_, key, kMaxCount));
  }
  return result;
}

std::int64_t GgufReader::count_or(const std::string& key, std::int64_t otherwise) {
  return find(key) != nullptr ? count(key) : otherwise;
}

double GgufReader::number_or(const std::string& key, double otherwise) {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  if (const auto* d = std::get_if<double>(value)) return *d;
  throw Error(ErrorCode::corrupt, fmt::format("{}: '{}{}' must be a float", where_, prefix_, key));
}

std::string GgufReader::text_or(const std::string& key, const std::string& otherwise) {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  if (const auto* s = std::get_if<std::string>(value)) return *s;
  throw Error(ErrorCode::corrupt, fmt::format("{}: '{}{}' must be a string", where_, prefix_, key));
}

std::optional<std::vector<bool>> GgufReader::flags(const std::string& key) {
  const auto* value = find(key);
  if (value == nullptr) return {};
  const auto* list = std::get_if<std::vector<bool>>(value);
  return list == nullptr ? std::nullopt : std::optional(*list);
}

void GgufReader::ignore_flag(const std::string& key) {
  const auto* value = find(key);
  if (value != nullptr && !std::holds_alternative<bool>(*value))
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}{}' must be a boolean", where_, prefix_, key));
}

void GgufReader::refuse_unused() const {
  for (const auto& [key, value] : file_.metadata) {
    if (key.starts_with(prefix_) && !used_.contains(key))
      throw Error(ErrorCode::unsupported, fmt::format("{}: the key '{}' is not supported", where_, key));
  }
}

}  // namespace basin::models
