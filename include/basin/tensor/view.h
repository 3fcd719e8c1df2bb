// Non-owning views of tensors: pointer, element type, shape and strides in elements (int64, may be zero).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "basin/base/dtype.h"

namespace basin {

/// A view of up to four dimensions. Strides count elements, not bytes. Plain (not block-quantised) types only.
template <typename Pointer>
struct BasicView {
  Pointer data = nullptr;  // may be null: an absent tensor
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> stride{};

  explicit operator bool() const { return data != nullptr; }

  /// A mutable view converts to a const one.
  operator BasicView<const void*>() const { return {data, dtype, rank, shape, stride}; }
};

using View = BasicView<void*>;
using ConstView = BasicView<const void*>;

/// A row-major view of `data`.
template <typename Pointer>
BasicView<Pointer> contiguous(Pointer data, DType dtype, std::initializer_list<std::int64_t> shape) {
  BasicView<Pointer> view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  int i = 0;
  for (const std::int64_t extent : shape) view.shape[static_cast<std::size_t>(i++)] = extent;
  std::int64_t stride = 1;
  for (i = view.rank - 1; i >= 0; --i) {
    view.stride[static_cast<std::size_t>(i)] = stride;
    stride *= view.shape[static_cast<std::size_t>(i)];
  }
  return view;
}

}  // namespace basin
