// Frequencies of every supported RoPE against those that transformers computes (tests/tools/make_rope_golden.py), through
// the reader of config.json.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/config.h"

namespace basin::models {
namespace {

using nlohmann::json;

// transformers computes in float32: 2^-24 for each of a few roundings, times the logarithm of the base.
constexpr double kTolerance = 1e-6;

json golden_cases() {
  std::ifstream in(BASIN_SOURCE_DIR "/tests/golden/rope/frequencies.json");
  return json::parse(in).at("cases");
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  const json cases = golden_cases();
  for (const auto& [name, golden] : cases.items()) result.push_back(name);
  return result;
}

class RopeGolden : public testing::TestWithParam<std::string> {};

TEST_P(RopeGolden, FrequenciesAndFactorOfTransformers) {
  const json golden = golden_cases().at(GetParam());
  const json config = {{"vocab_size", 320},
                       {"hidden_size", 64},
                       {"intermediate_size", 128},
                       {"num_attention_heads", 4},
                       {"num_hidden_layers", 1},
                       {"rms_norm_eps", 1e-6},
                       {"head_dim", golden["head_dim"]},
                       {"max_position_embeddings", golden["max_position_embeddings"]},
                       {"rope_parameters", golden["rope_parameters"]}};
  const ModelConfig read = read_hf_config(config, kLlama, GetParam());
  const ops::Rope rope(read.rope, read.rope_layout);
  const json& want = golden["inv_freq"];
  ASSERT_EQ(rope.frequencies().size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double expected = want[i].get<double>();
    EXPECT_NEAR(rope.frequencies()[i], expected, kTolerance * expected) << "pair " << i;
  }
  const double factor = golden["attention_scaling"];
  EXPECT_NEAR(rope.attention_factor(), factor, kTolerance * factor);
}

INSTANTIATE_TEST_SUITE_P(golden, RopeGolden, testing::ValuesIn(names()),
                         [](const auto& i) { return i.param; });

// The cases tell apart what they are there for, so that an option that is ignored cannot pass.
TEST(RopeGoldenCases, Differ) {
  const json cases = golden_cases();
  for (const char* type : {"default", "linear", "llama3", "yarn"}) {
    const auto has = [&](const json& c) { return c["rope_parameters"]["rope_type"] == type; };
    EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), has)) << type;
  }
  const auto differ = [&](const char* a, const char* b, const char* what) {
    const json &x = cases.at(a).at(what), &y = cases.at(b).at(what);
    double largest = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double p = x.is_array() ? x[i].get<double>() : x.get<double>();
      const double q = y.is_array() ? y[i].get<double>() : y.get<double>();
      largest = std::max(largest, std::abs(p / q - 1));
    }
    return largest > 100 * kTolerance;
  };
  EXPECT_TRUE(differ("yarn", "yarn_gpt_oss", "inv_freq")) << "truncate";
  EXPECT_TRUE(differ("yarn", "yarn_betas", "inv_freq"));
  EXPECT_TRUE(differ("yarn", "yarn_factor_1", "inv_freq"));
  EXPECT_TRUE(differ("yarn", "yarn_attention_factor", "attention_scaling"));
  EXPECT_TRUE(differ("yarn_mscale", "yarn_factor_1", "attention_scaling"));
}

}  // namespace
}  // namespace basin::models
