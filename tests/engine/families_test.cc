// What gpt-oss and Gemma 3 have that Llama lacks: every such thing changes what comes out, and local layers stay small.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "engine/runs.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace basin::test {
namespace {

using engine::Stream;
using engine::StreamOptions;
using nlohmann::json;

std::vector<std::int32_t> tokens_of(std::int64_t count) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<std::int32_t>((i * i * 13 + i * 7) % 320));
  return tokens;
}

std::vector<float> logits_with(const std::string& family, const char* patch) {
  Checkpoint checkpoint(golden_model(family));
  checkpoint.config.merge_patch(json::parse(patch));
  StreamOptions options;
  options.compute = ops::Compute::fp32;
  return all_logits(*models::load(checkpoint.write()).model, options, tokens_of(60));
}

TEST(Families, EveryKeyChangesTheResult) {
  const std::pair<const char*, const char*> keys[] = {
      {"gpt_oss", R"({"sliding_window": 8})"},
      {"gpt_oss", R"({"swiglu_limit": 0.1})"},
      {"gpt_oss", R"({"num_experts_per_tok": 3})"},
      {"gpt_oss",
       R"({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]})"},
      {"gpt_oss", R"({"rope_parameters": {"truncate": true}})"},
      {"gemma3_text", R"({"sliding_window": 8})"},
      {"gemma3_text", R"({"query_pre_attn_scalar": 64})"},
      {"gemma3_text", R"({"attn_logit_softcapping": 1.0})"},
      {"gemma3_text", R"({"rope_parameters": {"full_attention": {"rope_theta": 5000.0}}})"},
      {"gemma3_text", R"({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}})"},
      {"gemma3_text", R"({"rope_parameters": {"sliding_attention": {"rope_theta": 5000.0}}})"},
  };
  for (const auto& [family, patch] : keys) {
    EXPECT_GT(largest_difference(logits_with(family, patch), logits_with(family, "{}")), 0.01f)
        << family << patch;
  }
}

TEST(Families, TheFinalSoftcapBoundsLogits) {
  const auto plain = logits_with("gemma3_text", "{}");
  const auto capped = logits_with("gemma3_text", R"({"final_logit_softcapping": 2.5})");
  ASSERT_EQ(plain.size(), capped.size());
  for (std::size_t i = 0; i < plain.size(); ++i)
    ASSERT_NEAR(capped[i], 2.5f * std::tanh(plain[i] / 2.5f), 1e-5f);
}

// Published configurations spell what transformers 5 writes otherwise, and leave out what has a default.
TEST(Families, OlderSpellingsMeanTheSame) {
  const char* gemma = R"({"rope_parameters": null, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "rope_scaling": null, "layer_types": null, "_sliding_window_pattern": null, "sliding_window_pattern": 6,
    "tie_word_embeddings": null})";
  EXPECT_TRUE(same_bits(logits_with("gemma3_text", gemma), logits_with("gemma3_text", "{}")));
  const char* oss =
      R"({"rope_parameters": null, "rope_theta": 150000, "layer_types": null, "swiglu_limit": 7.0,
    "experts_per_token": 2, "initial_context_length": 64,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 64,
                     "rope_type": "yarn", "truncate": false}})";
  EXPECT_TRUE(same_bits(logits_with("gpt_oss", oss), logits_with("gpt_oss", "{}")));
}

TEST(Families, LocalLayersKeepTheirWindowOnly) {
  for (const char* family : {"gpt_oss", "gemma3_text"}) {
    const models::Loaded loaded = models::load(golden_model(family));
    const models::ModelConfig& c = loaded.model->config();
    std::int64_t full = 0, local = 0, window = 0;
    for (const models::LayerAttention& layer : c.layers) {
      (layer.window > 0 ? local : full) += 1;
      window = std::max(window, layer.window);
    }
    ASSERT_GT(local, 0);
    constexpr std::int64_t kTokens = 600, kPage = 4, kChunk = 25;
    const std::int64_t layer_page = 2 * kPage * c.h_kv * c.d_head * 4;
    const std::int64_t local_pages = kv::page_bound({0, window, false}, kPage, kChunk);
    for (const bool streams : {false, true}) {
      StreamOptions options;
      options.compute = ops::Compute::fp32;
      options.page_tokens = kPage;
      options.chunk_tokens = kChunk;
      if (streams) options.window = 60, options.sink_tokens = 4;
      ThreadPool pool(1);
      Stream stream(*loaded.model, options, pool);
      stream.feed(tokens_of(kTokens), models::LogitsRows::none, {});
      const std::int64_t full_pages =
          streams ? kv::page_bound({4, 60, true}, kPage, kChunk) : kTokens / kPage;
      EXPECT_LE(stream.report().kv_bytes_max, (full * full_pages + local * local_pages) * layer_page)
          << family;
      EXPECT_EQ(stream.report().kept_tokens_max, streams ? 64 : kTokens);
    }
  }
}

}  // namespace
}  // namespace basin::test
