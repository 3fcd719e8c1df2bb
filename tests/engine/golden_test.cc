// Parity: whole models against logits of another implementation, with and without a window, in every chunking.
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>

#include "engine/runs.h"
#include "engine/stream.h"
#include "models/checkpoint.h"
#include "models/model.h"
#include "support/golden.h"

namespace basin::test {
namespace {

using engine::PositionMode;
using engine::StreamOptions;

constexpr float kTolerance = 2e-3f;

struct Golden {
  models::Loaded loaded;
  GoldenFile file;
  std::vector<std::int32_t> tokens;

  explicit Golden(const std::filesystem::path& model)
      : loaded(models::load(model)), file(read_golden(model / "golden.safetensors")) {
    for (const std::int64_t id : file.at("input_ids").integers())
      tokens.push_back(static_cast<std::int32_t>(id));
  }
};

// logits_MODE_S_W, or nothing for another key.
std::optional<StreamOptions> parse_key(const std::string& key) {
  char mode[16] = "";
  long long sinks = 0, window = 0;
  if (std::sscanf(key.c_str(), "logits_%15[a-z]_%lld_%lld", mode, &sinks, &window) != 3) return {};
  StreamOptions options;
  options.positions = std::string(mode) == "absolute" ? PositionMode::absolute : PositionMode::in_cache;
  options.sink_tokens = sinks;
  options.window = window;
  return options;
}

class ModelGolden : public testing::TestWithParam<std::filesystem::path> {};

void expect_logits(Golden& golden, StreamOptions options, const std::vector<float>& want) {
  options.compute = ops::Compute::fp32;
  std::vector<float> first;
  for (const std::int64_t chunk : {1, 7, 64, 1 << 20}) {
    for (const std::int64_t page : {1, 16, 64}) {
      options.chunk_tokens = chunk;
      options.page_tokens = page;
      const auto logits = all_logits(*golden.loaded.model, options, golden.tokens, chunk == 7 ? 1 : 2);
      ASSERT_LE(largest_difference(logits, want), kTolerance) << "chunk " << chunk << " page " << page;
      if (first.empty()) first = logits;
      ASSERT_TRUE(same_bits(logits, first)) << "chunk " << chunk << " page " << page;
    }
  }
  options.attention_backend = attention::Backend::reference;
  options.chunk_tokens = 48;
  EXPECT_LE(largest_difference(all_logits(*golden.loaded.model, options, golden.tokens), want), kTolerance);
}

void expect_golden(Golden& golden, const StreamOptions& options, const std::string& key) {
  SCOPED_TRACE(key);
  expect_logits(golden, options, golden.file.at(key).floats());
}

TEST_P(ModelGolden, Logits) {
  Golden golden(GetParam());
  const auto& indexer = golden.loaded.model->config().indexer;
  if (!indexer) return expect_golden(golden, {}, "logits");
  // torch.topk leaves open which of equal scores it takes, and plateaus of zeros have many: from the first row that selects on, the
  // golden logits depend on that choice. tools/make_selection_golden.py has those of the rule here.
  StreamOptions options;
  options.compute = ops::Compute::fp32;
  const auto logits = all_logits(*golden.loaded.model, options, golden.tokens);
  const auto rows = static_cast<std::size_t>(indexer->topk * golden.loaded.model->config().vocabulary);
  const auto want = golden.file.at("logits").floats();
  EXPECT_LE(largest_difference(std::span(logits).first(rows), std::span(want).first(rows)), kTolerance);
  const auto stable = GetParam() / "selections.safetensors";
  if (!std::filesystem::exists(stable))
    GTEST_SKIP() << "no selections.safetensors; the rows before it were compared";
  expect_logits(golden, {}, read_golden(stable).at("logits").floats());
}

TEST_P(ModelGolden, StreamingLogits) {
  Golden golden(GetParam());
  int cases = 0;
  for (const auto& [key, tensor] : golden.file.tensors) {
    const auto options = parse_key(key);
    if (!options) continue;
    expect_golden(golden, *options, key);
    ++cases;
  }
  if (cases == 0) GTEST_SKIP() << "no streaming logits in this file";
}

TEST_P(ModelGolden, GreedyTokensWhereTheMarginIsClear) {
  Golden golden(GetParam());
  if (!golden.file.has("greedy")) GTEST_SKIP() << "no greedy tokens in this file";
  if (golden.loaded.model->config().indexer)
    GTEST_SKIP() << "they depend on which of equal scores were taken";
  const auto greedy = golden.file.at("greedy").integers();
  const auto margin = golden.file.at("greedy_margin").floats();
  std::vector<std::int32_t> tokens = golden.tokens;
  for (const std::int64_t id : greedy) tokens.push_back(static_cast<std::int32_t>(id));
  StreamOptions options;
  options.compute = ops::Compute::fp32;
  const auto logits = all_logits(*golden.loaded.model, options, tokens);
  const auto vocabulary = golden.loaded.model->config().vocabulary;
  int compared = 0;
  for (std::size_t i = 0; i < greedy.size(); ++i) {
    if (margin[i] <= 0.02f) continue;
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(golden.tokens.size() + i - 1) * vocabulary;
    EXPECT_EQ(std::max_element(row, row + vocabulary) - row, greedy[i]) << "step " << i;
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

INSTANTIATE_TEST_SUITE_P(golden, ModelGolden, testing::ValuesIn(supported_golden_models()),
                         [](const auto& i) { return folder_name(i.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ModelGolden);

}  // namespace
}  // namespace basin::test
