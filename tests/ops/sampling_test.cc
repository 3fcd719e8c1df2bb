#include "ops/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::map<std::int32_t, int> draw(const std::vector<float>& logits, const SamplingOptions& options,
                                 int count) {
  std::map<std::int32_t, int> seen;
  for (int i = 0; i < count; ++i) ++seen[sample(logits, options, {}, i)];
  return seen;
}

TEST(Sampling, GreedyTakesTheLargestAndTheLowestIdOfEqual) {
  EXPECT_EQ(sample(std::vector<float>{1, 3, 2}, {}, {}, 0), 1);
  EXPECT_EQ(sample(std::vector<float>{3, 3, 3}, {}, {}, 0), 0);
  EXPECT_EQ(sample(std::vector<float>{-kInf, -kInf}, {}, {}, 0), 0);
}

TEST(Sampling, FrequenciesFollowTheSoftmax) {
  SamplingOptions options;
  options.temperature = 1.0;
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f)};
  auto seen = draw(logits, options, 80000);
  // Standard deviation of a share at 80,000 draws is below 0.0018.
  EXPECT_NEAR(seen[0] / 80000.0, 1.0 / 8, 0.008);
  EXPECT_NEAR(seen[1] / 80000.0, 2.0 / 8, 0.008);
  EXPECT_NEAR(seen[2] / 80000.0, 5.0 / 8, 0.008);
}

TEST(Sampling, TemperatureSharpens) {
  SamplingOptions options;
  options.temperature = 0.5;
  auto seen = draw({0.0f, std::log(2.0f)}, options, 40000);
  EXPECT_NEAR(seen[1] / 40000.0, 0.8, 0.01);  // 2^2 / (1 + 2^2)
}

TEST(Sampling, TopKKeepsK) {
  SamplingOptions options;
  options.temperature = 100.0;
  options.top_k = 2;
  auto seen = draw({1, 2, 3, 4}, options, 1000);
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen.contains(2) && seen.contains(3));
  options.top_k = 100;
  EXPECT_EQ(draw({1, 2, 3, 4}, options, 1000).size(), 4u);
}

TEST(Sampling, TopPKeepsTheShortestPrefixThatReachesIt) {
  SamplingOptions options;
  options.temperature = 1.0;
  options.top_p = 0.7;  // 0.5, then 0.25 reaches it
  const std::vector<float> logits = {std::log(0.5f), std::log(0.25f), std::log(0.15f), std::log(0.1f)};
  EXPECT_EQ(draw(logits, options, 2000).size(), 2u);
  options.top_p = 1e-9;
  EXPECT_EQ(draw(logits, options, 100).size(), 1u);
}

TEST(Sampling, MinPIsRelativeToTheLargest) {
  SamplingOptions options;
  options.temperature = 1.0;
  options.min_p = 0.4;
  const std::vector<float> logits = {std::log(0.5f), std::log(0.25f), std::log(0.15f), std::log(0.1f)};
  EXPECT_EQ(draw(logits, options, 2000).size(), 2u);  // 0.25 / 0.5 is kept, 0.15 / 0.5 is not
}

// A filter that keeps all must not change the distribution, whatever order it walks in.
TEST(Sampling, FiltersThatKeepAllFollowTheSoftmax) {
  const std::vector<float> logits = {std::log(2.0f), 0.0f, std::log(5.0f)};
  for (int filter = 0; filter < 3; ++filter) {
    SamplingOptions options;
    options.temperature = 1.0;
    if (filter == 0) options.top_k = 3;
    if (filter == 1) options.top_p = 0.9999999;
    if (filter == 2) options.min_p = 1e-9;
    auto seen = draw(logits, options, 80000);
    EXPECT_NEAR(seen[0] / 80000.0, 2.0 / 8, 0.008) << filter;
    EXPECT_NEAR(seen[1] / 80000.0, 1.0 / 8, 0.008) << filter;
    EXPECT_NEAR(seen[2] / 80000.0, 5.0 / 8, 0.008) << filter;
  }
}

TEST(Sampling, FiltersCombineInTheStatedOrder) {
  SamplingOptions options;
  options.temperature = 1.0;
  options.top_k = 2;     // 0.4 and 0.3, so 4/7 and 3/7
  options.top_p = 0.57;  // 4/7 = 0.571 reaches it; without top_k first, 0.4 would not
  const std::vector<float> logits = {std::log(0.3f), std::log(0.4f), std::log(0.2f), std::log(0.1f)};
  auto seen = draw(logits, options, 500);
  EXPECT_EQ(seen.size(), 1u);
  EXPECT_TRUE(seen.contains(1));
}

TEST(Sampling, EqualLogitsAreKeptByLowestId) {
  SamplingOptions options;
  options.temperature = 1.0;
  options.top_k = 3;
  auto seen = draw(std::vector<float>(100, 1.0f), options, 500);
  EXPECT_EQ(seen.size(), 3u);
  EXPECT_EQ(seen.rbegin()->first, 2);
}

TEST(Sampling, NothingWithoutProbabilityIsDrawn) {
  SamplingOptions options;
  options.temperature = 1.0;
  auto seen = draw({-kInf, 0.0f, -kInf, 0.0f, -kInf}, options, 2000);
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen.contains(1) && seen.contains(3));
  options.temperature = 1e-300;
  EXPECT_EQ(draw({1.0f, 2.0f, 1.5f}, options, 50).size(), 1u);
}

TEST(Sampling, RepetitionPenaltyWeakensWhatWasSeen) {
  SamplingOptions options;
  options.repetition_penalty = 2.0;
  SeenTokens seen;
  seen.add(std::vector<std::int32_t>{0, 0, 2});
  EXPECT_EQ(sample(std::vector<float>{3, 2, -1}, options, seen, 0), 1);    // 3 / 2 < 2
  EXPECT_EQ(sample(std::vector<float>{-3, -5, -2}, options, seen, 0), 2);  // -2 * 2 > -5
  EXPECT_EQ(sample(std::vector<float>{5, 2, -1}, options, seen, 0), 0);    // once, not once per occurrence
  seen.add(std::vector<std::int32_t>{1000});                               // beyond these logits
  EXPECT_EQ(sample(std::vector<float>{3, 2, -1}, options, seen, 0), 1);
}

TEST(Sampling, SeenTokensAreKeptOnceEach) {
  SeenTokens seen;
  std::vector<std::int32_t> want;
  for (std::int32_t i = 0; i < 2000; ++i) {
    const std::int32_t id = i * i % 257;
    seen.add({&id, 1});
    if (std::find(want.begin(), want.end(), id) == want.end()) want.push_back(id);
    ASSERT_EQ(std::vector<std::int32_t>(seen.ids().begin(), seen.ids().end()), want);
  }
  EXPECT_THROW(seen.add(std::vector<std::int32_t>{-1}), Error);
}

TEST(Sampling, DependsOnSeedAndPositionOnly) {
  SamplingOptions options;
  options.temperature = 1.0;
  const std::vector<float> logits(50, 0.0f);
  EXPECT_EQ(sample(logits, options, {}, 7), sample(logits, options, {}, 7));
  int differ_by_seed = 0, differ_by_position = 0;
  for (int i = 0; i < 100; ++i) {
    SamplingOptions other = options;
    other.seed = 1;
    differ_by_seed += sample(logits, options, {}, i) != sample(logits, other, {}, i);
    differ_by_position += sample(logits, options, {}, i) != sample(logits, options, {}, i + 1);
  }
  EXPECT_GT(differ_by_seed, 80);
  EXPECT_GT(differ_by_position, 80);
}

TEST(Sampling, ExtremeLogits) {
  SamplingOptions options;
  options.temperature = 1.0;
  EXPECT_EQ(sample(std::vector<float>{-kInf, 3e38f, -3e38f}, options, {}, 0), 1);
  EXPECT_EQ(sample(std::vector<float>{0, kInf, 0}, options, {}, 0), 1);
  EXPECT_THROW(sample(std::vector<float>{0, std::nanf(""), 0}, options, {}, 0), Error);
  EXPECT_THROW(sample({}, options, {}, 0), Error);
}

TEST(SamplingRefused, NamesTheOptionAndTheRange) {
  const auto message = [](auto change) -> std::string {
    SamplingOptions options;
    change(options);
    try {
      check(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message([](SamplingOptions&) {}), "accepted");
  EXPECT_NE(message([](SamplingOptions& o) { o.temperature = -1; }).find("temperature is -1"),
            std::string::npos);
  EXPECT_NE(message([](SamplingOptions& o) { o.temperature = std::nan(""); }).find("temperature"),
            std::string::npos);
  EXPECT_NE(message([](SamplingOptions& o) { o.top_k = -1; }).find("top_k"), std::string::npos);
  EXPECT_NE(message([](SamplingOptions& o) { o.top_p = 0; }).find("top_p"), std::string::npos);
  EXPECT_NE(message([](SamplingOptions& o) { o.top_p = 1.1; }).find("top_p"), std::string::npos);
  EXPECT_NE(message([](SamplingOptions& o) { o.min_p = 2; }).find("min_p"), std::string::npos);
  EXPECT_NE(message([](SamplingOptions& o) { o.repetition_penalty = 0; }).find("repetition_penalty"),
            std::string::npos);
}

}  // namespace
}  // namespace basin::ops
