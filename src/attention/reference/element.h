// Reading and writing single elements of a view as double.
#pragma once

#include "basin/tensor/view.h"

namespace basin::attention::reference {

inline double load(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[i];
    case DType::f16:
      return static_cast<double>(to_float(static_cast<const f16*>(data)[i]));
    case DType::bf16:
      return static_cast<double>(to_float(static_cast<const bf16*>(data)[i]));
    default:
      return static_cast<double>(static_cast<const float*>(data)[i]);
  }
}

inline void store(void* data, DType dtype, std::int64_t i, double x) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[i] = x;
      break;
    case DType::f16:
      static_cast<f16*>(data)[i] = to_f16(static_cast<float>(x));
      break;
    case DType::bf16:
      static_cast<bf16*>(data)[i] = to_bf16(static_cast<float>(x));
      break;
    default:
      static_cast<float*>(data)[i] = static_cast<float>(x);
  }
}

/// x rounded to the precision of dtype.
inline double rounded(DType dtype, double x) {
  switch (dtype) {
    case DType::f64:
      return x;
    case DType::f16:
      return static_cast<double>(to_float(to_f16(static_cast<float>(x))));
    case DType::bf16:
      return static_cast<double>(to_float(to_bf16(static_cast<float>(x))));
    default:
      return static_cast<double>(static_cast<float>(x));
  }
}

/// Element offset of (row, head, 0) in [rows, heads, d].
template <typename Pointer>
std::int64_t at(const BasicView<Pointer>& view, std::int64_t row, std::int64_t head) {
  return row * view.stride[0] + head * view.stride[1];
}

}  // namespace basin::attention::reference
