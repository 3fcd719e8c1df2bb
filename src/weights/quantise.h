// From floats to every stored type that weights can have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "basin/base/dtype.h"

namespace basin::weights {

/// Whether `quantise_row` writes `dtype`: f32, f16, bf16 and the quantised blocks.
bool is_weight_type(DType dtype);

/// Stores x [count], a multiple of the block, as `dtype`: out holds count / block_elements blocks. f16 and bf16 round to nearest
/// even. q8_0, q4_0, q4_1, q5_0, q5_1 and mxfp4 are what ggml's reference quantisers give, bit for bit. q4_k, q5_k and q6_k take
/// the range of each part of a block as it is (quantise_k.cc), without a search for the least error. Returns the first element that
/// has no such form (a number beyond the range; in blocks also NaN and infinity), and nothing when there is none.
std::optional<std::int64_t> quantise_row(DType dtype, const float* x, std::int64_t count, std::byte* out);

}  // namespace basin::weights
