// A file that is there whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace basin::weights {

/// A temporary file beside `path` that vanishes unless it is committed. Throws Error(io), naming `path`, and
/// Error(invalid_argument) where something else than a file is in its place.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::uint64_t bytes);

  /// Flushes to the disk and takes the place of whatever is at `path`.
  void commit();

 private:
  [[noreturn]] void fail(const char* what);

  std::filesystem::path path_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace basin::weights
