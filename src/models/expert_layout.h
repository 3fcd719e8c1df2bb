// How Hugging Face's gpt-oss stores the matrices of an expert, beside the rows that products and GGUF have: transposed, or as MXFP4 in
// two tensors. Outputs of gate and up alternate in one matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace basin::models {

/// One expert's matrix [inputs, outputs]. copy_row(), here and below, copies the weights of one output to a row that products can use.
struct TransposedSource {
  const std::byte* data;  // [inputs, outputs] of one expert
  std::int64_t inputs, outputs, element_bytes;

  void copy_row(std::int64_t output, std::byte* to) const {
    const auto size = static_cast<std::size_t>(element_bytes);
    for (std::int64_t i = 0; i < inputs; ++i)
      std::memcpy(to + i * element_bytes, data + (i * outputs + output) * element_bytes, size);
  }
};

/// Blocks of 32: a byte holds elements 2 i and 2 i + 1 there, and i and i + 16 in a block of ours, behind its scale.
struct Mxfp4Source {
  const std::byte* blocks;  // [outputs, inputs / 32, 16] of one expert
  const std::byte* scales;  // [outputs, inputs / 32]
  std::int64_t inputs;

  void copy_row(std::int64_t output, std::byte* to) const {
    const std::int64_t count = inputs / 32;
    for (std::int64_t b = output * count; b < (output + 1) * count; ++b, to += 17) {
      const std::byte* from = blocks + b * 16;
      to[0] = scales[b];
      for (int i = 0; i < 16; ++i) {
        // Elements i and i + 16 lie in bytes i / 2 and i / 2 + 8, in the low half when even.
        const int shift = i % 2 == 0 ? 0 : 4;
        const std::byte low = (from[i / 2] >> shift) & std::byte{15};
        const std::byte high = (from[i / 2 + 8] >> shift) & std::byte{15};
        to[1 + i] = low | (high << 4);
      }
    }
  }
};

/// The elements of one block of ours in Hugging Face's order, 16 bytes; its scale is the block's first byte.
inline void copy_elements(const std::byte* block, std::byte* to) {
  const auto element = [&](int i) {
    const std::byte both = block[1 + i % 16];
    return i < 16 ? both & std::byte{15} : both >> 4;
  };
  for (int i = 0; i < 16; ++i) to[i] = element(2 * i) | (element(2 * i + 1) << 4);
}

}  // namespace basin::models
