// Memory that is kept from call to call, so that a call of a few microseconds does not pay for fresh pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace basin {

/// 64-byte aligned elements; grows and never shrinks. Contents are unspecified.
template <typename T>
class ScratchBuffer {
  static_assert(std::is_trivial_v<T>);

 public:
  T* at_least(std::size_t count) {
    if (count > count_) {
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
      count_ = data_ ? count : 0;
      if (!data_) throw std::bad_alloc();
      std::fill_n(data_.get(), count, T{});  // takes the pages now
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t count_ = 0;
};

}  // namespace basin
