// Products on the tensor cores, in every form that the kernels use.
#pragma once

#include "basin/base/dtype.h"

namespace basin::attention::cuda_tests {

/// How an operand reaches the tensor cores.
enum class Operand {
  k_major,    // shared memory as the copy engine writes it: q and k of scores
  mn_major,   // the same, transposed: v; as the second operand from 64 columns on
  plain,      // shared memory without swizzle, transposed: probabilities of decode; second operand only
  registers,  // probabilities of prefill; first operand only
};

struct ProductArguments {
  const void* a = nullptr;   // [64, depth]
  const void* b = nullptr;   // [columns, depth]
  const float* c = nullptr;  // [64, columns]: what the chain continues; null: it starts
  float* d = nullptr;        // [64, columns] = c + a b^T over the steps of 16 from `first` to before `last`
  int depth = 0;             // a multiple of 16
  int first = 0, last = 0;
};

/// A kernel with the argument ProductArguments for 128 threads and product_bytes of shared memory; null: there is no such form.
const void* product_kernel(DType dtype, int columns, Operand a, Operand b);

/// A kernel with arguments (CUtensorMap of a, of b, float* d) for 128 threads and loaded_product_bytes of shared memory:
/// d [64, 128] = a b^T over 128 columns of head 1, in boxes of 64 and 128 tokens from token 0.
const void* loaded_product_kernel(DType dtype);

constexpr int product_bytes(int depth, int columns) {
  return (depth + 63) / 64 * 128 * (64 + columns) + 1024;
}
inline constexpr int kLoadedProductBytes = product_bytes(128, 128);

}  // namespace basin::attention::cuda_tests
