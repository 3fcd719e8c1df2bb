// Memory that grows without copying: an anonymous mapping that the kernel may move. Fresh memory reads as zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace basin::kv {

class Region {
 public:
  Region() = default;
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  /// Makes at least `bytes` available; pointers from data() are invalid afterwards. Throws Error(internal) when the
  /// system refuses.
  void grow(std::int64_t bytes);

  std::byte* data() const { return data_; }  // null before the first grow

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace basin::kv
