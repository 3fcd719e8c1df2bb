// Golden models as GGUF files: the same logits as from safetensors, through the other reader, other names and, for llama,
// the other order of rows in Q and K.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "basin/base/error.h"
#include "engine/runs.h"
#include "models/checkpoint.h"
#include "models/gguf_copy.h"
#include "models/model.h"
#include "support/golden.h"

namespace basin::test {
namespace {

namespace fs = std::filesystem;

constexpr float kTolerance = 2e-3f;

class GgufGolden : public testing::TestWithParam<fs::path> {
 protected:
  fs::path write(const Checkpoint& checkpoint, const std::string& bytes) {
    const fs::path path = checkpoint.folder() / "model.gguf";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
};

TEST_P(GgufGolden, Logits) {
  const Checkpoint checkpoint(GetParam());
  const models::Loaded gguf = models::load(write(checkpoint, gguf_copy(checkpoint)));
  const models::Loaded safetensors = models::load(GetParam());
  const auto divisors = static_cast<std::int64_t>(gguf.model->config().rope.divisors.size());
  EXPECT_EQ(gguf.model->parameters() - divisors, safetensors.model->parameters());
  EXPECT_EQ(gguf.model->config().tied_embeddings, safetensors.model->config().tied_embeddings);
  const models::ModelConfig &a = gguf.model->config(), &b = safetensors.model->config();
  EXPECT_EQ(a.rope.type == ops::RopeType::standard, b.rope.type == ops::RopeType::standard || divisors > 0);
  EXPECT_EQ(a.architecture, b.architecture);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    EXPECT_EQ(a.layers[i].window, b.layers[i].window);
    EXPECT_EQ(a.layers[i].sink_logit, b.layers[i].sink_logit);
  }

  const GoldenFile golden = read_golden(GetParam() / "golden.safetensors");
  std::vector<std::int32_t> tokens;
  for (const std::int64_t id : golden.at("input_ids").integers())
    tokens.push_back(static_cast<std::int32_t>(id));
  engine::StreamOptions options;
  options.compute = ops::Compute::fp32;
  EXPECT_LE(largest_difference(all_logits(*gguf.model, options, tokens), golden.at("logits").floats()),
            kTolerance);
}

// The permutation is there: files without it give other logits, so that Logits cannot pass by chance.
TEST(GgufGoldenRows, UnpermutedRowsGiveOtherLogits) {
  Checkpoint checkpoint(fs::path(BASIN_SOURCE_DIR) / "tests" / "golden" / "models" / "llama_tiny");
  const auto load = [&](const std::string& bytes) {
    std::ofstream(checkpoint.folder() / "model.gguf", std::ios::binary) << bytes;
    return models::load(checkpoint.folder() / "model.gguf");
  };
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < 40; ++i) tokens.push_back(i * 7 % 320);
  const models::Loaded right = load(gguf_copy(checkpoint));
  const auto want = all_logits(*right.model, {}, tokens);
  const std::string as_qwen3 = [&] {  // whose rows keep their order
    Checkpoint renamed(fs::path(BASIN_SOURCE_DIR) / "tests" / "golden" / "models" / "llama_tiny");
    renamed.config["model_type"] = "qwen3";
    std::string bytes = gguf_copy(renamed);
    for (std::size_t at; (at = bytes.find("qwen3")) != std::string::npos;) bytes.replace(at, 5, "llama");
    return bytes;
  }();
  const models::Loaded wrong = load(as_qwen3);
  EXPECT_GT(largest_difference(all_logits(*wrong.model, {}, tokens), want), 100 * kTolerance);
}

// Files of Llama 3.1 and later carry what each frequency is divided by as a tensor, hostile as all else.
TEST(GgufGoldenRows, RopeDivisorsAreChecked) {
  Checkpoint checkpoint(golden_model("llama"));
  ASSERT_EQ(checkpoint.config["rope_parameters"]["rope_type"], "llama3");
  checkpoint.config["rope_parameters"]["rope_type"] = "default";
  const auto load = [&](std::vector<float> divisors) {
    weights::Tensor tensor;
    tensor.shape = {std::ssize(divisors)};
    tensor.data = reinterpret_cast<const std::byte*>(divisors.data());
    tensor.bytes = divisors.size() * sizeof(float);
    checkpoint.tensors["rope_freqs.weight"] = tensor;
    std::ofstream(checkpoint.folder() / "model.gguf", std::ios::binary) << gguf_copy(checkpoint);
    return models::load(checkpoint.folder() / "model.gguf");
  };
  EXPECT_EQ(load(std::vector<float>(8, 2.0f)).model->config().rope.divisors[7], 2.0f);
  for (const float bad :
       {0.0f, -2.0f, 0.5f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> divisors(8, 1.0f);
    divisors[0] = bad;
    try {
      load(divisors);
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt);
      EXPECT_THAT(error.what(), testing::HasSubstr("rope_freqs.weight"));
    }
  }
  EXPECT_THROW(load(std::vector<float>(7, 2.0f)), Error);
}

INSTANTIATE_TEST_SUITE_P(golden, GgufGolden, testing::ValuesIn(golden_models_with_gguf()),
                         [](const auto& i) { return folder_name(i.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GgufGolden);

}  // namespace
}  // namespace basin::test
