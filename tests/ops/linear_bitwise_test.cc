// The promise of linear.h: an output element does not depend on rows, threads or tiles, bit for bit.
#include <cstring>

#include "ops/linear.h"
#include "ops/weights.h"

namespace basin::ops::tests {
namespace {

bool same_bits(const float* a, const float* b, std::int64_t count) {
  return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

class LinearBitwise : public KernelTest {};

TEST_F(LinearBitwise, AlonePerChunkAndWhole) {
  constexpr std::int64_t kTokens = 150, kOutputs = 331;  // panels of several groups for few tokens
  ThreadPool one(1), two(2);
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t inputs : {whole_blocks(dtype, 96), whole_blocks(dtype, 576)}) {
      for (const Compute compute : {Compute::fp32, Compute::fast}) {
        const Weights weights(dtype, kOutputs, inputs, 1);
        const auto x = random_floats(kTokens * inputs, 2);
        const auto whole = multiply(x, kTokens, weights.matrix, compute, one);
        EXPECT_TRUE(same_bits(whole.data(), multiply(x, kTokens, weights.matrix, compute, two).data(),
                              kTokens * kOutputs));
        for (const std::int64_t chunk : {1, 2, 3, 7, 64}) {
          for (std::int64_t t = 0; t < kTokens; t += chunk) {
            const std::int64_t count = std::min(chunk, kTokens - t);
            const std::vector<float> part(x.begin() + t * inputs, x.begin() + (t + count) * inputs);
            const auto y = multiply(part, count, weights.matrix, compute, two);
            ASSERT_TRUE(same_bits(y.data(), whole.data() + t * kOutputs, count * kOutputs))
                << name(dtype) << " chunk " << chunk << " at " << t;
          }
        }
      }
    }
  }
}

TEST_F(LinearBitwise, ARowDoesNotDependOnItsNeighbours) {
  ThreadPool pool(2);
  for (const DType dtype : kWeightTypes) {
    const std::int64_t inputs = whole_blocks(dtype, 160);
    const Weights weights(dtype, 41, inputs, 3);
    const auto x = random_floats(6 * inputs, 4);
    const auto whole = multiply(x, 6, weights.matrix, Compute::fast, pool);
    for (std::int64_t r = 0; r < 41; ++r) {
      WeightMatrix row = weights.matrix;
      row.data += r * row.row_bytes();
      row.outputs = 1;
      const auto y = multiply(x, 6, row, Compute::fast, pool);
      for (std::int64_t t = 0; t < 6; ++t) {
        ASSERT_TRUE(
            same_bits(&y[static_cast<std::size_t>(t)], &whole[static_cast<std::size_t>(t * 41 + r)], 1))
            << name(dtype);
      }
    }
  }
}

// NaN and infinity in one token stay in that token.
TEST_F(LinearBitwise, AMarredTokenDoesNotTouchTheOthers) {
  ThreadPool pool(1);
  for (const DType dtype : kWeightTypes) {
    for (const Compute compute : {Compute::fp32, Compute::fast}) {
      const std::int64_t inputs = whole_blocks(dtype, 128);
      const Weights weights(dtype, 9, inputs, 5);
      const auto clean = random_floats(8 * inputs, 6);
      const auto expected = multiply(clean, 8, weights.matrix, compute, pool);
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        auto x = clean;
        x[static_cast<std::size_t>(3 * inputs + 40)] = bad;
        const auto y = multiply(x, 8, weights.matrix, compute, pool);
        for (std::int64_t t = 0; t < 8; ++t) {
          if (t == 3) {
            for (std::int64_t r = 0; r < 9; ++r)
              EXPECT_FALSE(std::isfinite(y[static_cast<std::size_t>(t * 9 + r)])) << name(dtype);
          } else {
            EXPECT_TRUE(
                same_bits(&y[static_cast<std::size_t>(t * 9)], &expected[static_cast<std::size_t>(t * 9)], 9))
                << name(dtype);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace basin::ops::tests
