// What a request adds to sampling: penalties by what was chosen, biases, and log-probabilities.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>

#include "basin/base/error.h"

namespace basin::test {
namespace {

using engine::Sampler;
using engine::SamplingRequest;

const std::vector<float> kLogits = {1.0f, 2.0f, 1.9f, -1.0f};

TEST(Sampler, PenaltiesCountWhatWasChosenAndNotThePrompt) {
  SamplingRequest request;
  const std::vector<std::int32_t> prompt = {1, 1, 1};
  request.presence_penalty = 0.2;
  Sampler presence(request, prompt);
  EXPECT_EQ(presence.choose(kLogits, 3), 1);
  EXPECT_EQ(presence.choose(kLogits, 4), 2);
  EXPECT_EQ(presence.choose(kLogits, 5), 1);  // both weakened alike
  request.presence_penalty = 0.0;
  request.frequency_penalty = 0.4;
  Sampler frequency(request, prompt);
  std::vector<std::int32_t> chosen;
  for (int i = 0; i < 7; ++i) chosen.push_back(frequency.choose(kLogits, 3 + i));
  EXPECT_EQ(chosen, (std::vector<std::int32_t>{1, 2, 1, 2, 1, 2, 0}));
}

TEST(Sampler, BiasComesBeforeEverything) {
  SamplingRequest request;
  request.logit_bias = {{1, -100.0}, {3, 2.0}};
  EXPECT_EQ(Sampler(request, {}).choose(kLogits, 0), 2);
  request.logit_bias.emplace_back(3, 100.0);
  EXPECT_EQ(Sampler(request, {}).choose(kLogits, 0), 3);
}

TEST(Sampler, LogprobsAreOfTheModelsOwnDistribution) {
  const engine::TokenLogprob got = engine::logprob_of(kLogits, 3, 2);
  double sum = 0;
  for (const float x : kLogits) sum += std::exp(static_cast<double>(x));
  EXPECT_NEAR(got.logprob, -1.0 - std::log(sum), 1e-12);
  ASSERT_EQ(got.top.size(), 2u);
  EXPECT_EQ(got.top[0].first, 1);
  EXPECT_EQ(got.top[1].first, 2);
  EXPECT_NEAR(got.top[0].second, 2.0 - std::log(sum), 1e-12);
  EXPECT_EQ(engine::logprob_of(std::vector<float>{5.0f, 5.0f, 5.0f}, 0, 20).top.size(), 3u);
  EXPECT_EQ(engine::logprob_of(std::vector<float>{5.0f, 5.0f, 5.0f}, 2, 1).top[0].first,
            0);  // ties: the lowest id
}

TEST(Sampler, RefusesWhatIsOutOfRange) {
  const auto refused = [](auto change) {
    SamplingRequest request;
    change(request);
    EXPECT_THROW(engine::check(request, 4), Error);
  };
  refused([](SamplingRequest& r) { r.presence_penalty = 2.1; });
  refused([](SamplingRequest& r) { r.frequency_penalty = std::nan(""); });
  refused([](SamplingRequest& r) { r.logit_bias = {{4, 0.0}}; });
  refused([](SamplingRequest& r) { r.logit_bias = {{-1, 0.0}}; });
  refused([](SamplingRequest& r) { r.logit_bias = {{0, 101.0}}; });
  refused([](SamplingRequest& r) { r.options.temperature = -1.0; });
  EXPECT_NO_THROW(engine::check(SamplingRequest{}, 4));
}

}  // namespace
}  // namespace basin::test
