// Typed access to the metadata that a GGUF file keeps below the name of its architecture, and a record of what was asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "weights/gguf.h"

namespace basin::models {

class GgufReader {
 public:
  /// Keys are those of `file` that begin with `prefix`. `file` must outlive the reader; `where` names it in messages.
  GgufReader(const weights::GgufFile& file, std::string prefix, std::string where)
      : file_(file), prefix_(std::move(prefix)), where_(std::move(where)) {}

  // Each throws Error(corrupt) when the value is absent, or is none of its kind.
  std::int64_t count(const std::string& key);  // an integer from 1 to kMaxCount
  std::int64_t count_or(const std::string& key, std::int64_t otherwise);
  double number_or(const std::string& key, double otherwise);
  std::string text_or(const std::string& key, const std::string& otherwise);
  /// A list of booleans; nothing when the key is absent or holds something else.
  std::optional<std::vector<bool>> flags(const std::string& key);
  /// A remark that is not maths: read, of its kind, and not used.
  void ignore_flag(const std::string& key);

  /// Every key of the architecture that nobody asked for might change the maths: throws Error(unsupported).
  void refuse_unused() const;

  const weights::GgufFile& file() const { return file_; }
  const std::string& where() const { return where_; }

 private:
  const weights::GgufValue* find(const std::string& key);

  const weights::GgufFile& file_;
  std::string prefix_, where_;
  std::set<std::string> used_;
};

}  // namespace basin::models
