// A file in memory that has a path, for readers that map files.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace basin::fuzz {

class MemoryFile {
 public:
  /// `data` may be null when `size` is 0.
  MemoryFile(const std::uint8_t* data, std::size_t size) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0) std::abort();
    for (std::size_t done = 0; done < size;) {
      const ssize_t written = ::write(descriptor_, data + done, size - done);
      if (written <= 0) std::abort();
      done += static_cast<std::size_t>(written);
    }
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

/// Reads every byte, so that a sanitizer or the kernel objects to those that are not there.
inline void touch(const std::byte* data, std::uint64_t bytes) {
  static volatile unsigned sum = 0;
  for (std::uint64_t i = 0; i < bytes; ++i) sum = sum + std::to_integer<unsigned>(data[i]);
}

/// A property that does not hold is a finding, as a crash is.
inline void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace basin::fuzz
