// Streams far beyond the trained context: bounded memory, and the same answer as a short text of what is kept.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/runs.h"
#include "engine/stream.h"
#include "kv/cache.h"
#include "models/checkpoint.h"
#include "models/model.h"
#include "ops/rope.h"

namespace basin::test {
namespace {

using engine::Stream;
using engine::StreamOptions;

// With one layer, keys and values depend on their own token only. So the last logits of a long stream are those of a
// short text of its sinks and its last tokens, where every position counts kept tokens.
TEST(LongStream, TwoHundredThousandTokensStayAtTheBound) {
  Checkpoint checkpoint(golden_model("llama"));
  checkpoint.cut(1);
  const models::Loaded loaded = models::load(checkpoint.write());
  const models::ModelConfig& c = loaded.model->config();
  constexpr std::int64_t kTokens = 200'000, kSinks = 4, kWindow = 252, kPage = 16, kChunk = 256;
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < kTokens; ++i)
    tokens.push_back(static_cast<std::int32_t>((i * 7919 + i / 11) % c.vocabulary));

  StreamOptions options;
  options.sink_tokens = kSinks;
  options.window = kWindow;
  options.page_tokens = kPage;
  options.chunk_tokens = kChunk;
  options.compute = ops::Compute::fp32;
  ThreadPool pool(2);
  Stream stream(*loaded.model, options, pool);
  std::vector<float> last;
  const auto keep = [&](std::int64_t, std::int64_t, std::span<const float> logits) {
    last.assign(logits.begin(), logits.end());
    return true;
  };
  constexpr std::int64_t kSlice = 5000;
  const kv::Policy policy{kSinks, kWindow, true};
  const std::int64_t page_bytes = 2 * kPage * c.h_kv * c.d_head * 4;
  for (std::int64_t begin = 0; begin < kTokens; begin += kSlice) {
    stream.feed(std::span(tokens).subspan(static_cast<std::size_t>(begin), kSlice), models::LogitsRows::last,
                keep);
    ASSERT_LE(stream.lengths().kept_tokens, kv::page_bound(policy, kPage, 1) * kPage);
    ASSERT_LE(stream.report().kv_bytes_max, kv::page_bound(policy, kPage, kChunk) * page_bytes);
  }
  EXPECT_EQ(stream.lengths().logical_position, kTokens);
  EXPECT_EQ(stream.report().kept_tokens_max, kSinks + kWindow);

  std::vector<std::int32_t> kept(tokens.begin(), tokens.begin() + kSinks);
  kept.insert(kept.end(), tokens.end() - kWindow, tokens.end());
  StreamOptions dense;
  dense.compute = ops::Compute::fp32;
  const auto logits = all_logits(*loaded.model, dense, kept);
  EXPECT_LE(largest_difference(last, std::span(logits).last(static_cast<std::size_t>(c.vocabulary))), 1e-4f);
}

TEST(LongStream, AnglesAreExactAtFourMillion) {
  ops::RopeConfig config;
  config.theta = 500000.0;
  config.rotary_dim = 64;
  const ops::Rope rope(config, ops::RopeLayout::half);
  const std::int64_t positions[] = {4, 8191, 4'000'000, 4'000'001};
  const ops::RopeTable table = rope.table(positions);
  for (std::size_t t = 0; t < std::size(positions); ++t) {
    for (std::size_t i = 0; i < 32; ++i) {
      const long double frequency = std::pow(500000.0L, -static_cast<long double>(i) / 32.0L);
      const long double angle = static_cast<long double>(positions[t]) * frequency;
      EXPECT_NEAR(table.cosine[t * 32 + i], static_cast<double>(std::cos(angle)), 1e-7)
          << positions[t] << " " << i;
      EXPECT_NEAR(table.sine[t * 32 + i], static_cast<double>(std::sin(angle)), 1e-7)
          << positions[t] << " " << i;
    }
  }
}

}  // namespace
}  // namespace basin::test
