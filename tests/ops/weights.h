// Random weights in every stored form, with their exact values, for tests of products.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "ops/linear.h"

namespace basin::ops::tests {

inline constexpr DType kWeightTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_1};

/// Owns the bytes; `matrix` points one byte behind an aligned address, since files promise no alignment.
struct Weights {
  std::vector<std::byte> bytes;
  std::vector<double> values;  // [outputs, inputs], decoded here, not by the code under test
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
