#include "weights/map_cached.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace basin::weights {

void map_cached(const MappedFile& file) {
#ifdef MADV_POPULATE_READ
  constexpr std::uint64_t kSlice = std::uint64_t{64} << 20;  // a multiple of the page size
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> is_cached(kSlice / page);
  for (std::uint64_t begin = 0; begin < file.size(); begin += kSlice) {
    const std::uint64_t bytes = std::min(kSlice, file.size() - begin);
    auto* const slice = const_cast<std::byte*>(file.data()) + begin;
    if (::mincore(slice, bytes, is_cached.data()) != 0) return;
    const auto end = is_cached.begin() + static_cast<std::ptrdiff_t>((bytes + page - 1) / page);
    const bool whole =
        std::all_of(is_cached.begin(), end, [](unsigned char byte) { return (byte & 1) != 0; });
    // Kernels before 5.14 refuse; then the first touch does it.
    if (whole && ::madvise(slice, bytes, MADV_POPULATE_READ) != 0) return;
  }
#else
  static_cast<void>(file);
#endif
}

}  // namespace basin::weights
