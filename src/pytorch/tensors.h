// From PyTorch's stable tensors to views, and the checks that the tensors of one call go together.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "basin/base/error.h"
#include "basin/tensor/view.h"

namespace basin::pytorch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      throw Error(ErrorCode::invalid_argument, "tensors must be float64, float32, float16 or bfloat16");
  }
}

template <typename Pointer>
BasicView<Pointer> view_as(const Tensor& tensor) {
  BasicView<Pointer> view;
  view.data = static_cast<Pointer>(tensor.data_ptr());
  view.dtype = dtype_of(tensor);
  view.rank = static_cast<int>(tensor.dim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[static_cast<std::size_t>(i)] = tensor.size(i);
    view.stride[static_cast<std::size_t>(i)] = tensor.stride(i);
  }
  return view;
}

/// The tensor, or a copy whose last dimension is dense.
inline Tensor dense_last(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : torch::stable::contiguous(tensor);
}

/// The int32 elements of an optional tensor of `rank` dimensions; null when it is absent.
inline const std::int32_t* int32_data(const char* name, const std::optional<Tensor>& tensor,
                                      std::int64_t rank) {
  if (!tensor) return nullptr;
  if (tensor->scalar_type() != ScalarType::Int || tensor->dim() != rank || !tensor->is_contiguous()) {
    throw Error(ErrorCode::invalid_argument, std::string(name) + " must be a contiguous int32 tensor of " +
                                                 std::to_string(rank) + " dimensions");
  }
  return static_cast<const std::int32_t*>(tensor->data_ptr());
}

}  // namespace basin::pytorch
