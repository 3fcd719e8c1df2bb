#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "basin/base/error.h"
#include "weights/weights.h"

namespace basin::weights {

MappedFile::MappedFile(const std::filesystem::path& path) {
  int descriptor = -1;
  const auto fail = [&](const char* what) {
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    throw Error(error == ENOENT || error == ENOTDIR ? ErrorCode::not_found : ErrorCode::io,
                fmt::format("{}: cannot {}: {}", path.string(), what, std::strerror(error)));
  };
  // O_NONBLOCK: opening a pipe must not wait for its writer; it is refused below.
  descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail("open");
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) fail("stat");
  if (!S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw Error(ErrorCode::io, fmt::format("{} is not a regular file", path.string()));
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
  if (size_ == 0) {  // an empty mapping is not allowed; a null pointer with size 0 says the same
    ::close(descriptor);
    return;
  }
  void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED) fail("map");
  ::close(descriptor);
  data_ = static_cast<const std::byte*>(mapping);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void require_exists(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::exists(path, error)) return;
  if (!error) throw Error(ErrorCode::not_found, fmt::format("{} does not exist", path.string()));
  throw Error(ErrorCode::io, fmt::format("{}: cannot look at it: {}", path.string(), error.message()));
}

}  // namespace basin::weights
