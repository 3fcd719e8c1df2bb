// A safetensors file with one float32 tensor, written as its rows come, that appears only when it is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "weights/atomic_file.h"

namespace basin::cli {

class LogitsFile {
 public:
  /// Creates a temporary file beside `path`, so that an unwritable place is known before any work. Throws
  /// Error(io | invalid_argument).
  explicit LogitsFile(const std::filesystem::path& path) : file_(path) {}

  /// Writes the header of `logits` [rows, columns]. Once, before the first append().
  void begin(std::int64_t rows, std::int64_t columns);
  void append(std::span<const float> values);
  /// Flushes to the device and renames. Throws Error(internal) when values are missing.
  void finish();

 private:
  weights::AtomicFile file_;
  std::int64_t missing_ = 0;  // values
};

}  // namespace basin::cli
