// The engine on every CPU target, forced by BASIN_CPU: logits, perplexity and schedule on small models, and that the target
// which was asked for is the one that ran.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/cpu/fixture.h"
#include "engine/runs.h"
#include "engine/tasks.h"
#include "models/checkpoint.h"
#include "models/model.h"
#include "support/golden.h"

namespace basin::test {
namespace {

using engine::Stream;
using engine::StreamOptions;
using ops::Compute;

class EngineOnTarget : public attention::cpu_tests::CpuTest, public testing::WithParamInterface<const char*> {
 protected:
  EngineOnTarget() {
    for (const std::int64_t id : golden.at("input_ids").integers())
      tokens.push_back(static_cast<std::int32_t>(id));
  }

  std::filesystem::path folder = std::filesystem::path(BASIN_SOURCE_DIR) / "tests/golden/models" / GetParam();
  GoldenFile golden = read_golden(folder / "golden.safetensors");
  models::Loaded loaded = models::load(folder);
  std::vector<std::int32_t> tokens;
  ThreadPool pool{2};
};

TEST_P(EngineOnTarget, GoldenLogitsInAnyChunking) {
  StreamOptions options;
  options.compute = Compute::fp32;
  const auto logits = all_logits(*loaded.model, options, tokens);
  EXPECT_LE(largest_difference(logits, golden.at("logits").floats()), 2e-3f);
  for (const Compute compute : {Compute::fp32, Compute::fast}) {
    options.compute = compute;
    options.chunk_tokens = 512;
    const auto whole = all_logits(*loaded.model, options, tokens);
    for (const std::int64_t chunk : {1, 7}) {
      options.chunk_tokens = chunk;
      EXPECT_TRUE(same_bits(all_logits(*loaded.model, options, tokens, 1), whole)) << "chunk " << chunk;
    }
  }
}

TEST_P(EngineOnTarget, PerplexityOfTheGoldenLogits) {
  const std::vector<double> logits = golden.at("logits").doubles();
  const auto vocabulary = static_cast<std::size_t>(loaded.model->config().vocabulary);
  double nll = 0;
  for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
    const double* row = logits.data() + t * vocabulary;
    double sum = 0;
    for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(row[i]);
    nll += std::log(sum) - row[tokens[t + 1]];
  }
  nll /= static_cast<double>(tokens.size() - 1);
  for (const Compute compute : {Compute::fp32, Compute::fast}) {
    StreamOptions options;
    options.compute = compute;
    Stream stream(*loaded.model, options, pool);
    const auto result = engine::perplexity(stream, tokens, nullptr, {}, nullptr);
    EXPECT_NEAR(result.mean_nll, nll, compute == Compute::fp32 ? 1e-4 : 1e-2);
    EXPECT_STREQ(stream.report().attention_backend, "cpu");
    EXPECT_EQ(stream.report().attention_target, name(cpu_target()));
  }
}

INSTANTIATE_TEST_SUITE_P(golden, EngineOnTarget,
                         testing::Values("llama_tiny", "qwen3_yarn_tiny", "gpt_oss_tiny",
                                         "gpt_oss_mxfp4_tiny", "gemma3_tiny"),
                         [](const auto& i) { return std::string(i.param); });

}  // namespace
}  // namespace basin::test
