// Blocks of 256 in parts with integer scales. One writer for each type: x [256], finite; out is the block.
#pragma once

#include <cstddef>

namespace basin::weights {

void quantise_q4_k(const float* x, std::byte* out);
void quantise_q5_k(const float* x, std::byte* out);
void quantise_q6_k(const float* x, std::byte* out);

}  // namespace basin::weights
