// y = x W^T (+ bias) for weights that stay in their stored (possibly quantised) form.
//
// Promise: each output element is one fixed sequence of operations over K that depends on the weight's dtype
// and the `Compute` only, never on the number of rows, on threads or on tiles. So a token's result is bitwise
// the same alone and in any batch. The targets but generic also agree, avx2 except on bf16 weights in fast
// products; generic has no fused multiply-add and rounds once more.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "basin/base/dtype.h"
#include "basin/base/thread_pool.h"

namespace basin::ops {

/// How activations enter a product. fp32: kept in float, weights widened to float. fast: bf16 pairs for bf16
/// weights (where the CPU has them), int8 blocks of 32 for quantised weights, float for the rest.
enum class Compute { fp32, fast };

/// A weight in row-major storage, [outputs, inputs]; borrowed (usually a mapped file), any alignment.
struct WeightMatrix {
  const std::byte* data = nullptr;  // not null
  DType dtype = DType::f32;         // f32, f16, bf16, or quantised
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;  // a multiple of the dtype's block

  std::int64_t row_bytes() const { return inputs / block_elements(dtype) * block_bytes(dtype); }
};

/// One product of a shared input.
struct LinearOutput {
  const WeightMatrix* weight = nullptr;  // not null; all weights of one call have the same `inputs`
  const float* bias = nullptr;           // [outputs], may be null
  float* y = nullptr;                    // [tokens, outputs], rows y_stride apart
  std::int64_t y_stride = 0;             // elements
};

/// All products of one input.
struct LinearInput {
  const float* x = nullptr;  // [tokens, inputs], rows x_stride apart
  std::int64_t x_stride = 0;
  std::int64_t tokens = 0;
  std::span<const LinearOutput> outputs;
};

/// What a call that follows at once multiplies: a thread that finishes begins to fetch its part of them. May be empty.
using NextMatrices = std::vector<const WeightMatrix*>;

/// Computes every product of every input, in one division of the work. Weights of different dtypes may share a call.
/// Throws Error(invalid_argument) on shape mismatch, Error(unsupported) on dtype.
void linear(std::span<const LinearInput> inputs, Compute compute, ThreadPool& pool,
            std::span<const WeightMatrix* const> next = {});

/// The same for one input.
inline void linear(const float* x, std::int64_t x_stride, std::int64_t tokens,
                   std::span<const LinearOutput> outputs, Compute compute, ThreadPool& pool,
                   std::span<const WeightMatrix* const> next = {}) {
  const LinearInput input{x, x_stride, tokens, outputs};
  linear({&input, 1}, compute, pool, next);
}

/// Widens one stored row to float: out[inputs]. Used for embeddings. Exact for every dtype.
void widen_row(const WeightMatrix& weight, std::int64_t row, float* out);

}  // namespace basin::ops
