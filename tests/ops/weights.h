// Random weights in every stored form, with their exact values, for tests of products.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "ops/linear.h"

namespace basin::ops::tests {

inline constexpr DType kQuantisedTypes[] = {DType::q8_0, DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1,
                                            DType::q4_k, DType::q5_k, DType::q6_k, DType::mxfp4};
inline constexpr DType kWeightTypes[] = {DType::f32,  DType::f16,  DType::bf16, DType::q8_0,
                                         DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1,
                                         DType::q4_k, DType::q5_k, DType::q6_k, DType::mxfp4};

/// One element of a quantised block: its value is d q + m.
struct Element {
  int q;
  float d;  // a block's scale times that of a part of it, which is exact
  float m;
};

/// Element i of a block, as the format defines it; written apart from the code under test.
Element element(DType dtype, const std::byte* block, int i);

/// The least width from `inputs` on that is a multiple of the dtype's block.
constexpr std::int64_t whole_blocks(DType dtype, std::int64_t inputs) {
  const std::int64_t block = block_elements(dtype);
  return (inputs + block - 1) / block * block;
}

/// Owns the bytes; `matrix` points one byte behind an aligned address, since files promise no alignment.
struct Weights {
  std::vector<std::byte> bytes;
  std::vector<double> values;     // [outputs, inputs], decoded here, not by the code under test
  std::vector<Element> elements;  // [outputs, inputs], of quantised weights
  WeightMatrix matrix;

  Weights(DType dtype, std::int64_t outputs, std::int64_t inputs, std::uint64_t seed);
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
};

std::vector<float> random_floats(std::int64_t count, std::uint64_t seed, float scale = 1.0f);

/// The product of one weight alone: y [tokens, outputs].
std::vector<float> multiply(const std::vector<float>& x, std::int64_t tokens, const WeightMatrix& weight,
                            Compute compute, ThreadPool& pool);

/// Skips targets that this CPU lacks and proves that the forced one runs.
class KernelTest : public testing::Test {
 protected:
  void SetUp() override;
};

}  // namespace basin::ops::tests
