// Extremes, bytes that must not be read, bytes that must not be written, and bad arguments.
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <cstring>

#include "basin/base/error.h"
#include "ops/linear.h"
#include "ops/weights.h"
#include "support/sanitizer.h"

namespace basin::ops::tests {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class LinearHostile : public KernelTest {};

TEST_F(LinearHostile, LargestQuantisedValuesDoNotSaturate) {
  ThreadPool pool(1);
  for (const DType dtype : kQuantisedTypes) {
    for (const int fill : {0x80, 0x7f, 0xff, 0x00}) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(2 * block_bytes(dtype)),
                                   static_cast<std::byte>(fill));
      const auto inputs = static_cast<std::size_t>(2 * block_elements(dtype));
      double sum = 0, magnitude = 0;
      for (int b = 0; b < 2; ++b) {
        std::byte* block = bytes.data() + b * block_bytes(dtype);
        const f16 one = to_f16(1.0f), zero = to_f16(0.0f);
        if (dtype == DType::mxfp4) {
          block[0] = std::byte{127};
        } else {
          std::memcpy(block + (dtype == DType::q6_k ? 208 : 0), &one, 2);
        }
        if (dtype == DType::q4_1 || dtype == DType::q5_1 || dtype == DType::q4_k || dtype == DType::q5_k)
          std::memcpy(block + 2, &zero, 2);
        for (int i = 0; i < block_elements(dtype); ++i) {
          const Element e = element(dtype, block, i);
          sum += static_cast<double>(e.d) * e.q;
          magnitude += std::fabs(static_cast<double>(e.d) * e.q);
        }
      }
      const WeightMatrix matrix{bytes.data(), dtype, 1, static_cast<std::int64_t>(inputs)};
      for (const float a : {1.0f, -1.0f, 1e30f, 1e-30f}) {
        const auto y = multiply(std::vector<float>(inputs, a), 1, matrix, Compute::fast, pool);
        EXPECT_NEAR(static_cast<double>(y[0]) / static_cast<double>(a), sum, 1e-5 * magnitude)
            << name(dtype) << " " << fill;
      }
    }
  }
}

TEST_F(LinearHostile, ZeroAndSubnormalTokensGiveNoNan) {
  ThreadPool pool(1);
  for (const DType dtype : kWeightTypes) {
    const std::int64_t inputs = whole_blocks(dtype, 64);
    const Weights weights(dtype, 5, inputs, 1);
    for (const float a : {0.0f, -0.0f, 1e-42f}) {
      for (const Compute compute : {Compute::fp32, Compute::fast}) {
        for (const float value : multiply(std::vector<float>(static_cast<std::size_t>(inputs), a), 1,
                                          weights.matrix, compute, pool)) {
          EXPECT_NEAR(value, 0.0f, 1e-38f) << name(dtype);
        }
      }
    }
  }
}

TEST_F(LinearHostile, ReadsAndWritesOnlyItsOwn) {
  ThreadPool pool(2);
  for (const DType dtype : kWeightTypes) {
    for (const Compute compute : {Compute::fp32, Compute::fast}) {
      constexpr std::int64_t kOutputs = 13, kTokens = 7, kYStride = 17;
      const std::int64_t inputs = whole_blocks(dtype, 96), x_stride = inputs + 4;
      const Weights weights(dtype, kOutputs, inputs, 2);
      const auto dense = random_floats(kTokens * inputs, 3);
      std::vector<float> x(static_cast<std::size_t>(kTokens * x_stride), kNan),
          y(kTokens * kYStride, 12345.0f);
      for (std::int64_t t = 0; t < kTokens; ++t)
        std::copy_n(dense.begin() + t * inputs, inputs, x.begin() + t * x_stride);
      const LinearOutput output{&weights.matrix, nullptr, y.data(), kYStride};
      linear(x.data(), x_stride, kTokens, {&output, 1}, compute, pool);
      const auto expected = multiply(dense, kTokens, weights.matrix, compute, pool);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t r = 0; r < kYStride; ++r) {
          const float value = y[static_cast<std::size_t>(t * kYStride + r)];
          if (r < kOutputs) {
            EXPECT_EQ(value, expected[static_cast<std::size_t>(t * kOutputs + r)]);
          } else {
            EXPECT_EQ(value, 12345.0f);
          }
        }
      }
    }
  }
}

#ifdef BASIN_HAS_ADDRESS_SANITIZER
// The kernels are compiled with fewer checks than the rest (cmake/options.cmake): these must stay.
TEST_F(LinearHostile, TheSanitizerSeesAReadBeyondTheWeightsAndAWriteBeyondTheOutputs) {
  constexpr std::int64_t kOutputs = 5;
  for (const DType dtype : kWeightTypes) {
    const std::int64_t inputs = whole_blocks(dtype, 64);
    const std::vector<float> x = random_floats(inputs, 1);
    const Weights weights(dtype, kOutputs, inputs, 2);
    const std::vector<std::byte> cut(weights.matrix.data, weights.bytes.data() + weights.bytes.size() - 1);
    WeightMatrix cut_matrix = weights.matrix;
    cut_matrix.data = cut.data();
    for (const Compute compute : {Compute::fp32, Compute::fast}) {
      const auto run = [&](const WeightMatrix& matrix, std::size_t outputs) {
        ThreadPool pool(1);
        std::vector<float> y(outputs);
        const LinearOutput output{&matrix, nullptr, y.data(), kOutputs};
        linear(x.data(), inputs, 1, {&output, 1}, compute, pool);
      };
      EXPECT_DEATH(run(cut_matrix, kOutputs), "AddressSanitizer") << name(dtype);
      EXPECT_DEATH(run(weights.matrix, kOutputs - 1), "AddressSanitizer") << name(dtype);
    }
  }
}
#endif

TEST_F(LinearHostile, NoTokensWriteNothing) {
  ThreadPool pool(1);
  const Weights weights(DType::f32, 2, 4, 1);
  float y[2] = {7, 7};
  const LinearOutput output{&weights.matrix, nullptr, y, 2};
  linear(nullptr, 4, 0, {&output, 1}, Compute::fast, pool);
  EXPECT_EQ(y[0], 7);
}

TEST_F(LinearHostile, BadArgumentsAreRefusedBeforeAnythingIsWritten) {
  ThreadPool pool(1);
  const Weights narrow(DType::f32, 2, 4, 1), wide(DType::f32, 2, 8, 1);
  float x[8] = {}, y[4] = {7, 7, 7, 7};
  const auto code_of = [&](std::vector<LinearOutput> outputs) {
    try {
      linear(x, 8, 1, outputs, Compute::fast, pool);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;
  };
  EXPECT_EQ(code_of({{&wide.matrix, nullptr, y, 2}, {&narrow.matrix, nullptr, y + 2, 2}}),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of({{&wide.matrix, nullptr, y, 1}}), ErrorCode::invalid_argument);
  const WeightMatrix integers{wide.bytes.data(), DType::i32, 2, 8};
  EXPECT_EQ(code_of({{&integers, nullptr, y, 2}}), ErrorCode::unsupported);
  const WeightMatrix cut{wide.bytes.data(), DType::q8_0, 1, 16};
  EXPECT_EQ(code_of({{&cut, nullptr, y, 1}}), ErrorCode::invalid_argument);
  EXPECT_THAT(y, testing::Each(7.0f));
  EXPECT_THROW(widen_row(wide.matrix, 2, y), Error);
}

}  // namespace
}  // namespace basin::ops::tests
