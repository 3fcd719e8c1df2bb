// DeepSeek-V3, V3.2 and GLM: latent attention in both forms, what indexers select, and that every key of a configuration counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <nlohmann/json.hpp>
#include <set>

#include "basin/base/error.h"
#include "engine/runs.h"
#include "models/cache.h"
#include "models/checkpoint.h"
#include "models/index_fp8.h"
#include "models/model.h"
#include "support/golden.h"

namespace basin::test {
namespace {

using engine::StreamOptions;
using nlohmann::json;

constexpr const char* kFamilies[] = {"deepseek_v3", "deepseek_v32", "glm_moe_dsa"};
constexpr const char* kSparse[] = {"deepseek_v32", "glm_moe_dsa"};

std::vector<std::int32_t> tokens_of(std::int64_t count) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<std::int32_t>((i * i * 13 + i * 7) % 320));
  return tokens;
}

StreamOptions exact() {
  StreamOptions options;
  options.compute = ops::Compute::fp32;
  return options;
}

std::vector<float> logits_with(const std::string& family, const char* patch) {
  Checkpoint checkpoint(golden_model(family));
  checkpoint.config.merge_patch(json::parse(patch));
  return all_logits(*models::load(checkpoint.write()).model, exact(), tokens_of(60));
}

// Keeps what each layer selected: [layer][tokens * topk].
struct Selections : models::PassObserver {
  explicit Selections(std::size_t layers) : rows(layers) {}
  std::int64_t resume(std::span<float>) override { return 0; }
  void attended(std::int64_t, const attention::Forward&, ThreadPool&) override {
    ADD_FAILURE() << "not selected";
  }
  void selected(std::int64_t layer, std::span<const std::int32_t> indices, const attention::Forward&,
                ThreadPool&) override {
    auto& to = rows[static_cast<std::size_t>(layer)];
    to.insert(to.end(), indices.begin(), indices.end());
  }
  void finished(std::int64_t, std::span<const float>) override {}
  std::vector<std::vector<std::int32_t>> rows;
};

std::vector<std::vector<std::int32_t>> selections(models::Model& model, std::span<const std::int32_t> tokens,
                                                  std::int64_t chunk, const StreamOptions& options,
                                                  int threads = 2) {
  ThreadPool pool(threads);
  kv::SequenceCache cache = engine::make_cache(options, model.config());
  Selections seen(model.config().layers.size());
  models::PassOptions pass;
  pass.compute = options.compute;
  pass.attention_backend = options.attention_backend;
  pass.index = options.index;
  pass.observer = &seen;
  for (std::size_t begin = 0; begin < tokens.size(); begin += static_cast<std::size_t>(chunk)) {
    const std::size_t size = std::min(static_cast<std::size_t>(chunk), tokens.size() - begin);
    const models::Chunk part{tokens.subspan(begin, size), &cache, models::LogitsRows::none};
    model.forward({&part, 1}, pass, {}, pool);
  }
  return seen.rows;
}

TEST(Latent, AbsorbedEqualsExpanded) {
  for (const char* family : kFamilies) {
    const models::Loaded loaded = models::load(golden_model(family));
    const auto tokens = tokens_of(100);
    StreamOptions options = exact();
    const auto absorbed = all_logits(*loaded.model, options, tokens);
    options.latent = models::LatentForm::expanded;
    const auto expanded = all_logits(*loaded.model, options, tokens);
    EXPECT_LE(largest_difference(absorbed, expanded), 1e-4f) << family;
    EXPECT_FALSE(same_bits(absorbed, expanded)) << family << ": one form ran twice";
    for (const std::int64_t chunk : {1, 7, 64}) {
      options.chunk_tokens = chunk;
      EXPECT_TRUE(same_bits(all_logits(*loaded.model, options, tokens, 1), expanded)) << family << chunk;
    }
  }
}

TEST(Latent, TheCacheKeepsOneLatentPerToken) {
  const models::Loaded loaded = models::load(golden_model("deepseek_v32"));
  const models::ModelConfig& c = loaded.model->config();
  const kv::Shape absorbed = models::cache_shape(c, ops::Compute::fast, 16);
  EXPECT_EQ(absorbed.row_floats(), c.latent->kv_rank + c.latent->d_rope + c.indexer->d_head);
  const kv::Shape expanded = models::cache_shape(c, ops::Compute::fast, 16, models::LatentForm::expanded);
  EXPECT_EQ(expanded.row_floats(), c.h_q * (c.latent->d_qk() + c.latent->d_v) + c.indexer->d_head);
}

TEST(Indexer, SelectsWhatTransformersSelects) {
  for (const char* family : kSparse) {
    const auto folder = golden_model(family);
    const GoldenFile golden = read_golden(folder / "golden.safetensors");
    const GoldenFile want = read_golden(folder / "selections.safetensors");
    std::vector<std::int32_t> tokens;
    for (const std::int64_t id : golden.at("input_ids").integers())
      tokens.push_back(static_cast<std::int32_t>(id));
    const models::Loaded loaded = models::load(folder);
    const auto found = selections(*loaded.model, tokens, 1 << 20, exact());
    const auto topk = static_cast<std::size_t>(loaded.model->config().indexer->topk);
    for (std::size_t layer = 0; layer < found.size(); ++layer) {
      const auto rows = want.at("topk_" + std::to_string(layer)).integers();
      const auto clear = want.at("clear_" + std::to_string(layer)).integers();
      std::size_t compared = 0;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        if (clear[t] == 0) continue;  // a tie, to float arithmetic
        ++compared;
        for (std::size_t i = 0; i < topk; ++i)
          ASSERT_EQ(found[layer][t * topk + i], rows[t * topk + i])
              << family << " layer " << layer << " row " << t;
      }
      EXPECT_GT(compared, tokens.size() * 8 / 10);
    }
  }
}

TEST(Indexer, ChunksDecodeAndThreadsSelectTheSame) {
  for (const char* family : kSparse) {
    const models::Loaded loaded = models::load(golden_model(family));
    const auto tokens = tokens_of(150);
    for (const ops::Compute compute : {ops::Compute::fp32, ops::Compute::fast}) {
      StreamOptions options;
      options.compute = compute;
      for (const bool fp8 : {false, true}) {
        options.index.fp8 = fp8;
        const auto whole = selections(*loaded.model, tokens, 1 << 20, options);
        for (const std::int64_t chunk : {1, 7, 64}) {
          options.page_tokens = chunk;
          EXPECT_EQ(selections(*loaded.model, tokens, chunk, options, 1), whole) << family << chunk;
        }
      }
    }
  }
}

TEST(Indexer, ScoresInFp8WhenAsked) {
  for (const char* family : kSparse) {
    const models::Loaded loaded = models::load(golden_model(family));
    const auto tokens = tokens_of(150);
    StreamOptions options = exact();
    const auto plain = selections(*loaded.model, tokens, 64, options);
    options.index.fp8 = true;
    const auto fp8 = selections(*loaded.model, tokens, 64, options);
    EXPECT_NE(plain, fp8);
    std::size_t same = 0;
    for (std::size_t i = 0; i < plain[0].size(); ++i) same += plain[0][i] == fp8[0][i] ? 1u : 0u;
    EXPECT_GT(same, plain[0].size() / 2) << "fp8 changes selections a little, not wholly";
  }
  StreamOptions options;
  options.index.fp8 = true;
  EXPECT_THROW(engine::check(options, models::load(golden_model("deepseek_v3")).model->config()), Error);
}

// The first and the last keys in places of the selection: as many keys as before, the rest by their scores.
TEST(Indexer, TakesSinkTokensAndAWindowWhenAsked) {
  constexpr std::int32_t kSinks = 3, kWindow = 5;
  for (const char* family : kSparse) {
    const models::Loaded loaded = models::load(golden_model(family));
    const std::int64_t topk = loaded.model->config().indexer->topk;
    const auto tokens = tokens_of(150);
    StreamOptions options = exact();
    const auto plain = selections(*loaded.model, tokens, 64, options);
    options.index.sink_tokens = kSinks;
    options.index.window = kWindow;
    const auto forced = selections(*loaded.model, tokens, 64, options);
    EXPECT_NE(plain, forced);
    EXPECT_EQ(forced, selections(*loaded.model, tokens, 1, options)) << "decode selects what prefill does";
    const auto row = [&](const std::vector<std::int32_t>& layer, std::int32_t t) {
      const auto* keys = layer.data() + t * topk;
      return std::set<std::int32_t>(keys, keys + std::min<std::int64_t>(topk, t + 1));
    };
    for (std::size_t layer = 0; layer < forced.size(); ++layer) {
      for (std::int32_t t = 0; t < 150; ++t) {
        const std::set<std::int32_t> keys = row(forced[layer], t), best = row(plain[layer], t);
        ASSERT_EQ(keys.size(), best.size());
        ASSERT_EQ(keys.count(-1), 0u);
        for (std::int32_t key = 0; key <= t; ++key) {
          const bool taken = key < kSinks || key > t - kWindow;
          if (taken) {
            ASSERT_TRUE(keys.contains(key)) << family << " query " << t << " key " << key;
          } else if (layer == 0 && keys.contains(key)) {
            ASSERT_TRUE(best.contains(key)) << "the rest goes by scores";
          }
        }
      }
    }
    options.index.window = topk - kSinks;  // all places
    const std::vector<std::int32_t> all = selections(*loaded.model, tokens, 64, options)[0];
    for (std::int32_t key = 0; key < topk; ++key)
      EXPECT_EQ(all[static_cast<std::size_t>(149 * topk + key)],
                key < kSinks ? key : key + 150 - static_cast<std::int32_t>(topk));
    options.index.window += 1;
    EXPECT_THROW(engine::check(options, loaded.model->config()), Error);
  }
  StreamOptions options;
  options.index.window = 1;
  EXPECT_THROW(engine::check(options, models::load(golden_model("deepseek_v3")).model->config()), Error);
}

TEST(Indexer, Fp8KeepsProductsAndItsGrid) {
  std::vector<float> x(128), y(128);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(static_cast<float>(i) * 0.7f) * 3.0f;
    y[i] = std::cos(static_cast<float>(i * i) * 0.3f);
  }
  double before = 0, after = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) before += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  ThreadPool pool(1);
  models::to_index_fp8(x.data(), 1, 128, pool);
  models::to_index_fp8(y.data(), 1, 128, pool);
  for (std::size_t i = 0; i < x.size(); ++i) {
    after += static_cast<double>(x[i]) * static_cast<double>(y[i]);
    size += std::abs(static_cast<double>(x[i]) * static_cast<double>(y[i]));
    int exponent = 0;  // four significant bits
    const float mantissa = std::frexp(x[i], &exponent) * 16.0f;
    EXPECT_EQ(mantissa, std::nearbyint(mantissa));
  }
  EXPECT_NEAR(after, before, 0.05 * size);
}

// Below index_topk tokens nothing is left out, so the indexer must not show.
TEST(Indexer, SelectingEverythingIsDenseAttention) {
  Checkpoint dense(golden_model("deepseek_v32"));
  dense.config["model_type"] = "deepseek_v3";
  for (const char* key : {"index_topk", "index_n_heads", "index_head_dim", "layer_types"})
    dense.config.erase(key);
  std::erase_if(dense.tensors,
                [](const auto& entry) { return entry.first.find(".indexer.") != std::string::npos; });
  const auto want = all_logits(*models::load(dense.write()).model, exact(), tokens_of(60));
  EXPECT_TRUE(same_bits(logits_with("deepseek_v32", R"({"index_topk": 60})"), want));
  const auto sparse = logits_with("deepseek_v32", R"({"index_topk": 59})");
  const auto rows = static_cast<std::ptrdiff_t>(59 * 320);
  EXPECT_TRUE(std::equal(sparse.begin(), sparse.begin() + rows, want.begin()));
  EXPECT_FALSE(same_bits(sparse, want)) << "the last row leaves one key out";
}

TEST(Indexer, SharedLayersTakeTheSelectionBeforeThem) {
  Checkpoint checkpoint(golden_model("glm_moe_dsa"));
  checkpoint.config["indexer_types"] = {"full", "shared", "full"};
  std::erase_if(checkpoint.tensors, [](const auto& entry) {
    return entry.first.find("layers.1.self_attn.indexer.") != std::string::npos;
  });
  const models::Loaded loaded = models::load(checkpoint.write());
  const auto found = selections(*loaded.model, tokens_of(100), 1 << 20, exact());
  EXPECT_EQ(found[1], found[0]);
  EXPECT_NE(found[2], found[0]);
  EXPECT_EQ(selections(*loaded.model, tokens_of(100), 7, exact()), found);
  // The same as a pattern, and as a schedule.
  checkpoint.config.erase("indexer_types");
  checkpoint.config["index_topk_pattern"] = "FSF";
  EXPECT_EQ(selections(*models::load(checkpoint.write()).model, tokens_of(100), 64, exact()), found);
  checkpoint.config.erase("index_topk_pattern");
  checkpoint.config["index_topk_freq"] = 2;
  checkpoint.config["index_skip_topk_offset"] = 1;
  EXPECT_EQ(selections(*models::load(checkpoint.write()).model, tokens_of(100), 64, exact()), found);
  checkpoint.config["indexer_types"] = {"shared", "full", "full"};
  EXPECT_THROW(models::load(checkpoint.write()), Error);
}

TEST(Deepseek, EveryKeyChangesTheResult) {
  const std::pair<const char*, const char*> keys[] = {
      {"deepseek_v3", R"({"rope_interleave": false})"},
      {"deepseek_v3", R"({"routed_scaling_factor": 1.0})"},
      {"deepseek_v3", R"({"norm_topk_prob": false})"},
      {"deepseek_v3", R"({"num_experts_per_tok": 1})"},
      {"deepseek_v3", R"({"n_group": 1})"},
      {"deepseek_v3", R"({"topk_group": 2})"},
      {"deepseek_v3", R"({"rope_parameters": {"rope_theta": 500.0}})"},
      {"deepseek_v3",
       R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                          "mscale": 1.0, "mscale_all_dim": 1.0}})"},
      {"deepseek_v32", R"({"index_topk": 12})"},
      {"deepseek_v32", R"({"indexer_rope_interleave": true})"},
      {"glm_moe_dsa", R"({"indexer_rope_interleave": false})"},
  };
  for (const auto& [family, patch] : keys) {
    EXPECT_GT(largest_difference(logits_with(family, patch), logits_with(family, "{}")), 0.01f)
        << family << patch;
  }
  // YaRN's factor in the scale of scores: with mscale beside it the rotation itself is not scaled.
  const char* yarn =
      R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                        "mscale": 1.0, "mscale_all_dim": 1.0}})";
  Checkpoint checkpoint(golden_model("deepseek_v3"));
  checkpoint.config.merge_patch(json::parse(yarn));
  const double mscale = 0.1 * std::log(4.0) + 1.0;
  EXPECT_NEAR(models::load(checkpoint.write()).model->config().attention_scale,
              mscale * mscale / std::sqrt(48.0), 1e-12);
}

TEST(Deepseek, PublishedSpellings) {
  const char* older =
      R"({"rope_parameters": null, "rope_theta": 10000, "rope_scaling": null, "head_dim": null,
    "mlp_layer_types": null, "layer_types": null, "first_k_dense_replace": 1, "moe_layer_freq": 1, "ep_size": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "qk_head_dim": null, "num_nextn_predict_layers": 1})";
  for (const char* family : kFamilies)
    EXPECT_TRUE(same_bits(logits_with(family, older), logits_with(family, "{}"))) << family;
  for (const char* patch : {R"({"scoring_func": "softmax"})", R"({"topk_method": "greedy"})",
                            R"({"moe_layer_freq": 2})", R"({"n_group": 3})", R"({"n_group": 4})",
                            R"({"topk_group": 3})", R"({"qk_rope_head_dim": 15})", R"({"index_topk": 8})"})
    EXPECT_THROW(logits_with("deepseek_v3", patch), Error) << patch;
}

// Layers behind the last one guess further tokens; they are named in the configuration and not read.
TEST(Deepseek, ExtraLayersAreLeftOut) {
  Checkpoint checkpoint(golden_model("deepseek_v3"));
  const auto want = all_logits(*models::load(checkpoint.write()).model, exact(), tokens_of(40));
  auto extra = checkpoint.tensors;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    if (name.starts_with("model.layers.2.")) extra["model.layers.3." + name.substr(15)] = tensor;
  }
  checkpoint.tensors = extra;
  for (auto& [name, tensor] : checkpoint.tensors) tensor.name = name;
  EXPECT_TRUE(same_bits(all_logits(*models::load(checkpoint.write()).model, exact(), tokens_of(40)), want));
  checkpoint.config["num_nextn_predict_layers"] = 0;
  EXPECT_THROW(models::load(checkpoint.write()), Error);
}

// F8_E4M3 with a scale for each block, as the published checkpoints are: the same as bf16 weights of these values.
TEST(Deepseek, Fp8BlocksAreTheirValues) {
  Checkpoint fp8(golden_model("deepseek_v32")), plain(golden_model("deepseek_v32"));
  fp8.config["quantization_config"] = {{"quant_method", "fp8"},
                                       {"fmt", "e4m3"},
                                       {"scale_fmt", "ue8m0"},
                                       {"activation_scheme", "dynamic"},
                                       {"weight_block_size", {16, 16}}};
  std::deque<std::vector<std::byte>> memory;  // whose elements stay where they are
  std::map<std::string, weights::Tensor> scales;
  for (auto& [name, tensor] : fp8.tensors) {
    const bool quantised =
        name.find("_proj.weight") != std::string::npos || name.find(".wq_b.") != std::string::npos;
    if (!quantised || tensor.shape.size() != 2) continue;
    const std::int64_t rows = tensor.shape[0], columns = tensor.shape[1];
    auto& bytes = memory.emplace_back(static_cast<std::size_t>(rows * columns));
    auto& values = memory.emplace_back(static_cast<std::size_t>(2 * rows * columns));
    const std::int64_t blocks_r = (rows + 15) / 16, blocks_c = (columns + 15) / 16;
    auto& scale_bytes = memory.emplace_back(static_cast<std::size_t>(4 * blocks_r * blocks_c));
    for (std::int64_t i = 0; i < blocks_r * blocks_c; ++i)
      reinterpret_cast<float*>(scale_bytes.data())[i] = std::ldexp(1.0f, -6 - static_cast<int>(i % 3));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const auto word =
            static_cast<std::uint8_t>((r * 37 + c * 101 + 11) % 0x7e | (r * c % 2 == 0 ? 0x80 : 0));
        const float scale = reinterpret_cast<float*>(scale_bytes.data())[r / 16 * blocks_c + c / 16];
        bytes[static_cast<std::size_t>(r * columns + c)] = static_cast<std::byte>(word);
        reinterpret_cast<bf16*>(values.data())[r * columns + c] =
            to_bf16(f8_e4m3_to_float(word) * scale * 0x1p-4f);
      }
    }
    for (std::int64_t i = 0; i < blocks_r * blocks_c; ++i)
      reinterpret_cast<float*>(scale_bytes.data())[i] *= 0x1p-4f;
    plain.tensors.at(name).data = values.data();
    tensor.dtype = DType::f8_e4m3;
    tensor.data = bytes.data();
    tensor.bytes = bytes.size();
    weights::Tensor& scale = scales[name + "_scale_inv"];
    scale = {name + "_scale_inv", DType::f32, {blocks_r, blocks_c}, scale_bytes.data(), scale_bytes.size()};
  }
  fp8.tensors.insert(scales.begin(), scales.end());
  const auto got = all_logits(*models::load(fp8.write()).model, exact(), tokens_of(60));
  EXPECT_TRUE(same_bits(got, all_logits(*models::load(plain.write()).model, exact(), tokens_of(60))));
  for (const float value : got) ASSERT_TRUE(std::isfinite(value));
}

TEST(Latent, WindowsOfBothKinds) {
  for (const char* family : kFamilies) {
    const models::Loaded loaded = models::load(golden_model(family));
    const auto tokens = tokens_of(140);
    const auto whole = all_logits(*loaded.model, exact(), tokens);
    for (const auto positions : {engine::PositionMode::in_cache, engine::PositionMode::absolute}) {
      StreamOptions options = exact();
      options.positions = positions;
      options.sink_tokens = 5;
      options.window = 200;
      EXPECT_TRUE(same_bits(all_logits(*loaded.model, options, tokens), whole)) << family;
      options.window = 40;
      const auto windowed = all_logits(*loaded.model, options, tokens);
      EXPECT_FALSE(same_bits(windowed, whole));
      for (const std::int64_t chunk : {1, 7}) {
        options.chunk_tokens = chunk;
        options.page_tokens = 4;
        EXPECT_TRUE(same_bits(all_logits(*loaded.model, options, tokens, 1), windowed)) << family << chunk;
      }
      options.attention_backend = attention::Backend::reference;
      options.chunk_tokens = 64;
      EXPECT_LE(largest_difference(all_logits(*loaded.model, options, tokens), windowed), 2e-3f) << family;
    }
  }
}

}  // namespace
}  // namespace basin::test
