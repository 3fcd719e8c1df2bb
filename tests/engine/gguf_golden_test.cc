// Golden models as GGUF files: the same logits as from safetensors, through the other reader, other names and, for llama,
// the other order of rows in Q and K.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

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

std::string rope_type(const fs::path& model) {
  return Checkpoint(model).config.at("rope_parameters").at("rope_type");
}

class GgufGolden : public testing::TestWithParam<fs::path> {
 protected:
  fs::path write(const Checkpoint& checkpoint, const std::string& bytes) {
    const fs::path path = checkpoint.folder() / "model.gguf";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
};

TEST_P(GgufGolden, Logits) {
  if (rope_type(GetParam()) == "llama3")
    GTEST_SKIP() << "its GGUF form needs rope_freqs.weight, see Llama3RopeIsRefused";
  const Checkpoint checkpoint(GetParam());
  const models::Loaded gguf = models::load(write(checkpoint, gguf_copy(checkpoint)));
  const models::Loaded safetensors = models::load(GetParam());
  EXPECT_EQ(gguf.model->parameters(), safetensors.model->parameters());
  EXPECT_EQ(gguf.model->config().tied_embeddings, safetensors.model->config().tied_embeddings);
  EXPECT_EQ(gguf.model->config().rope.type, safetensors.model->config().rope.type);

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

// Files of Llama 3.1 and later carry their frequencies as a tensor; it is refused by name, not ignored.
TEST(GgufGoldenRows, Llama3RopeIsRefused) {
  Checkpoint checkpoint(golden_model("llama"));
  ASSERT_EQ(checkpoint.config["rope_parameters"]["rope_type"], "llama3");
  checkpoint.config["rope_parameters"]["rope_type"] = "default";
  std::vector<float> factors(8, 2.0f);
  weights::Tensor tensor;
  tensor.shape = {8};
  tensor.data = reinterpret_cast<const std::byte*>(factors.data());
  tensor.bytes = factors.size() * sizeof(float);
  checkpoint.tensors["rope_freqs.weight"] = tensor;
  std::ofstream(checkpoint.folder() / "model.gguf", std::ios::binary) << gguf_copy(checkpoint);
  try {
    models::load(checkpoint.folder() / "model.gguf");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_THAT(error.what(), testing::HasSubstr("rope_freqs.weight"));
  }
}

INSTANTIATE_TEST_SUITE_P(golden, GgufGolden, testing::ValuesIn(supported_golden_models()),
                         [](const auto& i) { return folder_name(i.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GgufGolden);

}  // namespace
}  // namespace basin::test
