#include "ops/elementwise.h"

#include <cmath>
#include <cstring>

#include "basin/base/error.h"
#include "ops/weights.h"

namespace basin::ops::tests {
namespace {

class Elementwise : public KernelTest {};

TEST_F(Elementwise, RmsNorm) {
  ThreadPool pool(2);
  for (const std::int64_t width : {1, 15, 16, 17, 64, 576, 577}) {
    const std::int64_t tokens = 5, stride = width + 3;
    const auto x = random_floats(tokens * stride, 1, 3.0f), weight = random_floats(width, 2);
    std::vector<float> y(static_cast<std::size_t>(tokens * stride), 99.0f);
    rms_norm(x.data(), stride, weight.data(), 1e-5f, y.data(), stride, tokens, width, pool);
    for (std::int64_t t = 0; t < tokens; ++t) {
      double squares = 0;
      for (std::int64_t i = 0; i < width; ++i)
        squares += std::pow(static_cast<double>(x[static_cast<std::size_t>(t * stride + i)]), 2);
      const double inverse = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
      for (std::int64_t i = 0; i < stride; ++i) {
        const auto at = static_cast<std::size_t>(t * stride + i);
        if (i >= width) {
          EXPECT_EQ(y[at], 99.0f);
          continue;
        }
        const double exact =
            static_cast<double>(x[at]) * inverse * static_cast<double>(weight[static_cast<std::size_t>(i)]);
        EXPECT_NEAR(static_cast<double>(y[at]), exact, 1e-6 * std::fabs(exact) + 1e-30);
      }
    }
  }
}

TEST_F(Elementwise, RmsNormInPlaceAndOfAZeroRow) {
  ThreadPool pool(1);
  std::vector<float> x(32, 0.0f), weight(32, 2.0f);
  rms_norm(x.data(), 32, weight.data(), 1e-6f, x.data(), 32, 1, 32, pool);
  for (const float value : x) EXPECT_EQ(value, 0.0f);
}

TEST_F(Elementwise, LayerNorm) {
  ThreadPool pool(2);
  for (const std::int64_t width : {2, 17, 128}) {
    const std::int64_t tokens = 5, stride = width + 3;
    auto x = random_floats(tokens * stride, 11, 2.0f);
    for (float& value : x) value += 30.0f;  // a mean far from zero, which an RMS norm would keep
    const auto weight = random_floats(width, 12), bias = random_floats(width, 13);
    std::vector<float> y(x);
    layer_norm(y.data(), stride, weight.data(), bias.data(), 1e-6f, y.data(), stride, tokens, width, pool);
    for (std::int64_t t = 0; t < tokens; ++t) {
      double mean = 0, variance = 0;
      for (std::int64_t i = 0; i < width; ++i)
        mean += x[static_cast<std::size_t>(t * stride + i)] / static_cast<double>(width);
      for (std::int64_t i = 0; i < width; ++i)
        variance += std::pow(static_cast<double>(x[static_cast<std::size_t>(t * stride + i)]) - mean, 2) /
                    static_cast<double>(width);
      for (std::int64_t i = 0; i < stride; ++i) {
        const auto at = static_cast<std::size_t>(t * stride + i), column = static_cast<std::size_t>(i);
        if (i >= width) {
          EXPECT_EQ(y[at], x[at]);
          continue;
        }
        const double exact = (static_cast<double>(x[at]) - mean) / std::sqrt(variance + 1e-6) *
                                 static_cast<double>(weight[column]) +
                             static_cast<double>(bias[column]);
        EXPECT_NEAR(static_cast<double>(y[at]), exact, 1e-6 + 1e-6 * std::fabs(exact));
      }
    }
  }
}

TEST_F(Elementwise, SiluMultiply) {
  ThreadPool pool(2);
  auto gate = random_floats(3 * 37, 3, 8.0f);
  gate[0] = -100.0f;  // exp(100) overflows a float
  gate[1] = 100.0f;
  gate[2] = 0.0f;
  const auto up = random_floats(3 * 37, 4);
  std::vector<float> y(gate.size());
  silu_multiply(gate.data(), up.data(), y.data(), 3, 37, pool);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double g = static_cast<double>(gate[i]);
    const double exact = g / (1 + std::exp(-g)) * static_cast<double>(up[i]);
    EXPECT_NEAR(static_cast<double>(y[i]), exact, 1e-6 * std::fabs(exact) + 1e-40) << gate[i];
  }
}

TEST_F(Elementwise, GeluMultiply) {
  ThreadPool pool(2);
  auto gate = random_floats(3 * 37, 3, 4.0f);
  gate[0] = -100.0f;
  gate[1] = 100.0f;
  gate[2] = 0.0f;
  const auto up = random_floats(3 * 37, 4);
  std::vector<float> y(gate.size());
  gelu_multiply(gate.data(), up.data(), y.data(), 3, 37, pool);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double g = static_cast<double>(gate[i]);
    const double inner = std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g);
    const double exact = g / (1 + std::exp(-2 * inner)) * static_cast<double>(up[i]);
    // The exponent's rounding error grows with it.
    EXPECT_NEAR(static_cast<double>(y[i]), exact, 1e-6 * (1 + std::fabs(inner)) * std::fabs(exact) + 1e-38)
        << gate[i];
  }
}

TEST_F(Elementwise, SwigluClamped) {
  ThreadPool pool(2);
  auto gate = random_floats(3 * 37, 3, 8.0f), up = random_floats(3 * 37, 4, 8.0f);
  gate[0] = -200.0f;
  up[1] = std::nanf("");
  gate[2] = std::nanf("");
  for (const float limit : {7.0f, 0.5f}) {
    std::vector<float> y(gate.size());
    swiglu_clamped(gate.data(), up.data(), limit, y.data(), 3, 37, pool);
    EXPECT_TRUE(std::isnan(y[1]) && std::isnan(y[2]));
    for (std::size_t i = 0; i < y.size(); ++i) {
      if (i == 1 || i == 2) continue;
      const auto bound = static_cast<double>(limit);
      const double g = std::min(static_cast<double>(gate[i]), bound);
      const double u = std::clamp(static_cast<double>(up[i]), -bound, bound);
      const double exact = g / (1 + std::exp(-1.702 * g)) * (u + 1);
      EXPECT_NEAR(static_cast<double>(y[i]), exact, 2e-5 * std::fabs(exact) + 1e-38)
          << gate[i] << " " << up[i];
    }
  }
}

TEST_F(Elementwise, Softcap) {
  ThreadPool pool(2);
  auto x = random_floats(40001, 5, 30.0f);
  const auto before = x;
  softcap(x.data(), 10.0f, 40001, pool);
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(static_cast<double>(x[i]), 10 * std::tanh(static_cast<double>(before[i]) / 10), 1e-5);
}

TEST_F(Elementwise, Add) {
  ThreadPool pool(2);
  auto x = random_floats(50001, 5);
  const auto before = x, y = random_floats(50001, 6);
  add(x.data(), y.data(), 50001, pool);
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], before[i] + y[i]);
}

TEST_F(Elementwise, NegativeLogLikelihood) {
  ThreadPool pool(2);
  for (const std::int64_t vocab : {1, 2, 320, 1023, 1025, 49152}) {
    const std::int64_t tokens = 3;
    const auto logits = random_floats(tokens * vocab, 7, 10.0f);
    const std::vector<std::int32_t> target = {0, static_cast<std::int32_t>(vocab / 2),
                                              static_cast<std::int32_t>(vocab - 1)};
    std::vector<double> nll(3);
    negative_log_likelihood(logits.data(), target.data(), nll.data(), tokens, vocab, pool);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* row = logits.data() + t * vocab;
      double largest = -1e300, sum = 0;
      for (std::int64_t i = 0; i < vocab; ++i) largest = std::max(largest, static_cast<double>(row[i]));
      for (std::int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(row[i]) - largest);
      const double exact =
          largest + std::log(sum) - static_cast<double>(row[target[static_cast<std::size_t>(t)]]);
      EXPECT_NEAR(nll[static_cast<std::size_t>(t)], exact, 2e-6) << vocab;
    }
  }
}

TEST_F(Elementwise, NegativeLogLikelihoodOfExtremes) {
  ThreadPool pool(1);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> logits(100, -kInf);
  logits[7] = -1e30f;
  const std::int32_t target = 7;
  double nll = -1;
  negative_log_likelihood(logits.data(), &target, &nll, 1, 100, pool);
  EXPECT_EQ(nll, 0.0);
  std::fill(logits.begin(), logits.end(), 3e38f);  // e^3e38 is beyond any float
  negative_log_likelihood(logits.data(), &target, &nll, 1, 100, pool);
  EXPECT_NEAR(nll, 0.0, 1e32);  // log(100) is below one step of 3e38
}

TEST_F(Elementwise, NegativeLogLikelihoodOfNanIsNan) {
  ThreadPool pool(1);
  for (const std::size_t at : {0u, 50u, 96u, 99u}) {  // 96 and 99 are beyond the last whole vector
    std::vector<float> logits(100, 1.0f);
    logits[at] = std::numeric_limits<float>::quiet_NaN();
    const std::int32_t target = 7;
    double nll = 0;
    negative_log_likelihood(logits.data(), &target, &nll, 1, 100, pool);
    EXPECT_TRUE(std::isnan(nll)) << at << ": " << nll;
  }
}

TEST_F(Elementwise, TargetsOutsideTheVocabularyAreRefused) {
  ThreadPool pool(1);
  const std::vector<float> logits(8, 1.0f);
  double nll[2] = {-1, -1};
  for (const std::int32_t bad : {-1, 4}) {
    const std::int32_t targets[2] = {0, bad};
    EXPECT_THROW(negative_log_likelihood(logits.data(), targets, nll, 2, 4, pool), Error);
    EXPECT_EQ(nll[0], -1);
  }
}

TEST_F(Elementwise, RowsDoNotDependOnTheBatch) {
  ThreadPool pool(2);
  const std::int64_t tokens = 40, width = 577;
  const auto x = random_floats(tokens * width, 8), weight = random_floats(width, 9);
  std::vector<float> whole(x.size()), alone(static_cast<std::size_t>(width));
  rms_norm(x.data(), width, weight.data(), 1e-5f, whole.data(), width, tokens, width, pool);
  for (std::int64_t t = 0; t < tokens; ++t) {
    rms_norm(x.data() + t * width, width, weight.data(), 1e-5f, alone.data(), width, 1, width, pool);
    EXPECT_EQ(std::memcmp(alone.data(), whole.data() + t * width, static_cast<std::size_t>(width) * 4), 0);
  }
  silu_multiply(x.data(), x.data(), whole.data(), tokens, width, pool);
  for (std::int64_t t = 0; t < tokens; ++t) {
    silu_multiply(x.data() + t * width, x.data() + t * width, alone.data(), 1, width, pool);
    EXPECT_EQ(std::memcmp(alone.data(), whole.data() + t * width, static_cast<std::size_t>(width) * 4), 0);
  }
}

}  // namespace
}  // namespace basin::ops::tests
