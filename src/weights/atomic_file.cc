#include "weights/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "basin/base/error.h"

namespace basin::weights {

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path) {
  std::error_code error;
  // What a link points to is replaced, not the link.
  if (std::filesystem::is_symlink(path_, error)) path_ = std::filesystem::weakly_canonical(path_, error);
  const std::filesystem::file_status status = std::filesystem::status(path_, error);
  if (std::filesystem::exists(status)) {
    if (!std::filesystem::is_regular_file(status)) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("cannot write {}: not a regular file", path_.string()));
    }
    if (::access(path_.c_str(), W_OK) != 0) fail("open");
  }
  // Not mkstemp: its files are private whatever the umask says.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    temporary_ = fmt::format("{}.{}.{}", path_.string(), ::getpid(), attempt);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0 || errno != EEXIST) break;
  }
  if (descriptor_ < 0) fail("create a file beside it");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(const void* data, std::uint64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, at, std::min<std::uint64_t>(bytes, 1u << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    at += written;
    bytes -= static_cast<std::uint64_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("flush");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
  ::close(descriptor_);
  descriptor_ = -1;
  // The new name must survive a crash too; the file is complete whatever the directory's flush says.
  const auto parent = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  const int directory = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void AtomicFile::fail(const char* what) {
  throw Error(ErrorCode::io,
              fmt::format("cannot write {}: {}: {}", path_.string(), what, std::strerror(errno)));
}

}  // namespace basin::weights
