// From one stored type to another, tensor by tensor.
#pragma once

#include <cstdint>
#include <optional>

#include "basin/base/thread_pool.h"
#include "weights/output.h"

namespace basin::models {

/// What a conversion to `wanted` makes of a tensor. Matrices of weights (two dimensions or more) become `wanted`; weights of one
/// dimension and biases become f32; a router is not quantised, since it is small and decides much; other dtypes stay. Where nothing
/// is wanted all keep theirs, but that GGUF has vectors in f32. Throws Error(unsupported) naming a tensor whose rows are no whole
/// number of `wanted`'s blocks, or that safetensors has no dtype for.
DType converted_dtype(const weights::Tensor& tensor, std::optional<DType> wanted, bool to_gguf);

/// `tensor` stored as `dtype`. The same dtype is copied; another goes through float: exact from f16 and bf16 to f32, as weights::quantise_row
/// rounds otherwise. A few rows at a time are in memory. Producing throws Error(unsupported) naming the tensor and a value that
/// `dtype` cannot hold. `pool` must outlive the result.
weights::Output converted(const weights::Tensor& tensor, DType dtype, ThreadPool& pool);

}  // namespace basin::models
