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

TEST(Moe, GroupsAreChosenByTheirTwoBest) {
  constexpr std::int64_t kTokens = 60, kExperts = 24;
  const auto logits = random_floats(kTokens * kExperts, 9);
  auto correction = random_floats(kExperts, 10);
  for (float& value : correction) value *= 0.1f;
  for (const std::int64_t groups : {1, 2, 6}) {
    for (const std::int64_t chosen_groups : {1, 2, 6}) {
      if (chosen_groups > groups) continue;
      for (const bool normalise : {false, true}) {
        const std::int64_t size = kExperts / groups;
        GroupedChoice choice{.chosen = 4,
                             .groups = groups,
                             .chosen_groups = chosen_groups,
                             .normalise = normalise,
                             .scale = 2.5};
        Routing routing;
        route_grouped(logits.data(), correction.data(), kTokens, kExperts, choice, routing);
        for (std::int64_t t = 0; t < kTokens; ++t) {
          // Plainly, in double.
          std::vector<std::pair<double, std::int64_t>> best_groups, order;
          std::vector<double> score(kExperts);
          for (std::size_t e = 0; e < kExperts; ++e)
            score[e] =
                1 / (1 + std::exp(-static_cast<double>(logits[static_cast<std::size_t>(t * kExperts) + e])));
          const auto wanted = [&](std::int64_t e) {
            return score[static_cast<std::size_t>(e)] +
                   static_cast<double>(correction[static_cast<std::size_t>(e)]);
          };
          for (std::int64_t g = 0; g < groups; ++g) {
            std::vector<double> in;
            for (std::int64_t e = g * size; e < (g + 1) * size; ++e) in.push_back(wanted(e));
            std::sort(in.rbegin(), in.rend());
            best_groups.emplace_back(-(in.at(0) + in.at(1)), g);
          }
          std::sort(best_groups.begin(), best_groups.end());
          for (std::int64_t n = 0; n < chosen_groups; ++n) {
            const std::int64_t g = best_groups[static_cast<std::size_t>(n)].second;
            for (std::int64_t e = g * size; e < (g + 1) * size; ++e) order.emplace_back(-wanted(e), e);
          }
          std::sort(order.begin(), order.end());
          double sum = 0;
          for (std::size_t i = 0; i < 4; ++i) sum += score[static_cast<std::size_t>(order.at(i).second)];
          for (std::size_t i = 0; i < 4; ++i) {
            const auto at = static_cast<std::size_t>(t) * 4 + i;
            ASSERT_EQ(routing.expert[at], order.at(i).second);
            const double weight =
                score[static_cast<std::size_t>(order.at(i).second)] * 2.5 / (normalise ? sum : 1);
            ASSERT_NEAR(routing.weight[at], weight, 1e-5);
          }
        }
      }
    }
  }
  GroupedChoice choice{.chosen = 2, .groups = 2, .chosen_groups = 1};
  Routing routing;
  const std::vector<float> equal(8, 0.25f), none(8, 0.0f);
  route_grouped(equal.data(), none.data(), 1, 8, choice, routing);
  EXPECT_EQ(routing.expert, (std::vector<std::int32_t>{0, 1}));  // of equals the lower number
  const std::vector<float> bad = {0, 0, std::numeric_limits<float>::quiet_NaN(), 0, 0, 0, 0, 0};
  EXPECT_THROW(route_grouped(bad.data(), none.data(), 1, 8, choice, routing), Error);
}

}  // namespace
}  // namespace basin::ops
