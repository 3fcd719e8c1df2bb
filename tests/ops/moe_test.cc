// Routing and weighing of experts against plain sums, and that no token depends on the others.
#include "ops/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(Moe, TheLargestLogitsAndTheirSoftmax) {
  constexpr std::int64_t kTokens = 40, kExperts = 32;
  const auto logits = random_floats(kTokens * kExperts, 1);
  for (const std::int64_t chosen : {1, 4, 32}) {
    Routing routing;
    route(logits.data(), kTokens, kExperts, chosen, routing);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const float* row = logits.data() + t * kExperts;
      std::vector<float> sorted(row, row + kExperts);
      std::sort(sorted.rbegin(), sorted.rend());
      double sum = 0;
      for (std::int64_t i = 0; i < chosen; ++i)
        sum += std::exp(static_cast<double>(sorted[static_cast<std::size_t>(i)]));
      for (std::int64_t i = 0; i < chosen; ++i) {
        const auto at = static_cast<std::size_t>(t * chosen + i);
        EXPECT_EQ(row[routing.expert[at]], sorted[static_cast<std::size_t>(i)]);
        EXPECT_NEAR(routing.weight[at],
                    std::exp(static_cast<double>(sorted[static_cast<std::size_t>(i)])) / sum, 1e-6);
      }
    }
  }
}

TEST(Moe, OfEqualLogitsTheLowerNumberIsFirst) {
  const std::vector<float> logits = {1, 2, 2, -1, 2, 0, -0.0f, 0, 0, 0};
  Routing routing;
  route(logits.data(), 2, 5, 2, routing);
  EXPECT_EQ(routing.expert, (std::vector<std::int32_t>{1, 2, 0, 1}));
  EXPECT_EQ(routing.weight, std::vector<float>(4, 0.5f));
}

TEST(Moe, LogitsThatAreNotFiniteAreRefused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    const std::vector<float> logits = {0, 1, 2, 3, bad, 5};
    Routing routing;
    EXPECT_THROW(route(logits.data(), 2, 3, 1, routing), Error);
  }
}

TEST(Moe, WeighsInTheOrderOfTheChoiceWhateverTheBatch) {
  constexpr std::int64_t kTokens = 23, kExperts = 8, kChosen = 3, kWidth = 37;
  const auto logits = random_floats(kTokens * kExperts, 2);
  const auto answers = random_floats(kTokens * kChosen * kWidth, 3);
  Routing all;
  route(logits.data(), kTokens, kExperts, kChosen, all);
  std::vector<float> y(kTokens * kWidth, std::numeric_limits<float>::quiet_NaN());
  ThreadPool pool(2);
  weigh(all, answers.data(), kWidth, y.data(), pool);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    Routing one;
    route(logits.data() + t * kExperts, 1, kExperts, kChosen, one);
    std::vector<float> alone(kWidth);
    weigh(one, answers.data() + t * kChosen * kWidth, kWidth, alone.data(), pool);
    for (std::int64_t k = 0; k < kWidth; ++k) {
      double want = 0;
      for (std::int64_t i = 0; i < kChosen; ++i) {
        want += static_cast<double>(one.weight[static_cast<std::size_t>(i)]) *
                static_cast<double>(answers[static_cast<std::size_t>((t * kChosen + i) * kWidth + k)]);
      }
      EXPECT_NEAR(alone[static_cast<std::size_t>(k)], want, 1e-5);
      EXPECT_EQ(y[static_cast<std::size_t>(t * kWidth + k)], alone[static_cast<std::size_t>(k)]);
    }
  }
}

}  // namespace
}  // namespace basin::ops
