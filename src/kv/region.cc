#include "kv/region.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "basin/base/error.h"

namespace basin::kv {

Region::~Region() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(bytes_));
}

void Region::grow(std::int64_t bytes) {
  if (bytes <= bytes_) return;
  const auto size = static_cast<std::size_t>(bytes);
  void* moved = data_ == nullptr ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                                 : ::mremap(data_, static_cast<std::size_t>(bytes_), size, MREMAP_MAYMOVE);
  if (moved == MAP_FAILED) {
    throw Error(ErrorCode::internal,
                fmt::format("cannot get {} bytes for keys and values: {}", bytes, std::strerror(errno)),
                "use a smaller --window, or --sink-tokens with a window instead of the whole text");
  }
  data_ = static_cast<std::byte*>(moved);
  bytes_ = bytes;
}

}  // namespace basin::kv
