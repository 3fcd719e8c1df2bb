#include "cli/logits_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "basin/base/error.h"

namespace basin::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

Error cannot_write(const std::filesystem::path& path, int error) {
  return Error(ErrorCode::io, fmt::format("cannot write {}: {}", path.string(), std::strerror(error)));
}

}  // namespace

LogitsFile::LogitsFile(const std::filesystem::path& path) : path_(path) {
  std::error_code error;
  if (std::filesystem::is_symlink(path_, error)) path_ = std::filesystem::weakly_canonical(path_, error);
  const std::filesystem::file_status status = std::filesystem::status(path_, error);
  if (std::filesystem::exists(status)) {
    if (!std::filesystem::is_regular_file(status)) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("cannot write {}: not a regular file", path_.string()));
    }
    if (::access(path_.c_str(), W_OK) != 0) throw cannot_write(path_, errno);
  }
  std::string name = path_.string() + ".XXXXXX";
  descriptor_ = ::mkostemp(name.data(), O_CLOEXEC);
  if (descriptor_ < 0) throw cannot_write(path_, errno);
  temporary_ = name;
  const mode_t mask = ::umask(0);  // mkostemp gives 0600; the result should look like any new file
  ::umask(mask);
  static_cast<void>(::fchmod(descriptor_, 0666 & ~mask));  // cosmetic: a refusal leaves the file private
}

LogitsFile::~LogitsFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void LogitsFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      throw cannot_write(path_, errno);
    }
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void LogitsFile::begin(std::int64_t rows, std::int64_t columns) {
  missing_ = rows * columns;
  std::string header = fmt::format(R"({{"logits":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}}}})",
                                   rows, columns, missing_ * static_cast<std::int64_t>(sizeof(float)));
  header.resize((header.size() + 7) / 8 * 8, ' ');  // the format aligns the data to 8
  const std::uint64_t header_bytes = header.size();
  write(&header_bytes, sizeof(header_bytes));
  write(header.data(), header.size());
}

void LogitsFile::append(std::span<const float> values) {
  missing_ -= static_cast<std::int64_t>(values.size());
  write(values.data(), values.size_bytes());
}

void LogitsFile::finish() {
  if (missing_ != 0) throw Error(ErrorCode::internal, fmt::format("logits: {} values short", missing_));
  if (::fsync(descriptor_) != 0) throw cannot_write(path_, errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) throw cannot_write(path_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw cannot_write(path_, errno);
  temporary_.clear();
}

}  // namespace basin::cli
