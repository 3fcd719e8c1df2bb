// From a MODEL argument to bound tensors: path forms, and no tensor missing, ignored or of the wrong shape.
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "models/checkpoint.h"
#include "models/expect_error.h"
#include "models/model.h"

namespace basin::models {
namespace {

namespace fs = std::filesystem;
using test::Checkpoint;
using test::expect_error;
using test::golden_model;

TEST(ModelTensors, EveryMissingTensorIsNamed) {
  for (const char* family : {"llama", "qwen3", "gpt_oss", "gemma3_text"}) {
    const Checkpoint whole(golden_model(family));
    for (const auto& [name, tensor] : whole.tensors) {
      if (name.starts_with("model.layers.") && !name.starts_with("model.layers.2"))
        continue;  // one layer stands for the others
      Checkpoint checkpoint(golden_model(family));
      checkpoint.tensors.erase(name);
      expect_error(checkpoint.write(), ErrorCode::corrupt, name);
    }
  }
}

TEST(ModelTensors, ExtraTensorsAreNamed) {
  for (const char* extra : {"model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.sinks",
                            "model.layers.9.mlp.up_proj.weight"}) {
    Checkpoint checkpoint(golden_model("llama"));
    checkpoint.tensors[extra] = checkpoint.tensors.at("model.norm.weight");
    expect_error(checkpoint.write(), ErrorCode::unsupported, extra);
  }
}

TEST(ModelTensors, WrongShapesAndTypesAreNamed) {
  const std::string name = "model.layers.0.self_attn.o_proj.weight";
  Checkpoint turned(golden_model("qwen3"));
  auto& shape = turned.tensors.at(name).shape;
  std::swap(shape[0], shape[1]);
  ASSERT_NE(shape[0], shape[1]);
  expect_error(turned.write(), ErrorCode::corrupt, name);

  Checkpoint flat(golden_model("qwen3"));
  flat.tensors.at(name).shape = {shape[0] * shape[1]};
  expect_error(flat.write(), ErrorCode::corrupt, name);

  Checkpoint integers(golden_model("qwen3"));
  integers.tensors.at(name).dtype = DType::i16;
  expect_error(integers.write(), ErrorCode::unsupported, name);
}

TEST(ModelTensors, Mxfp4ExpertsAreBlocksAndScales) {
  const fs::path model = fs::path(BASIN_SOURCE_DIR) / "tests" / "golden" / "models" / "gpt_oss_mxfp4_tiny";
  const std::string blocks = "model.layers.2.mlp.experts.gate_up_proj_blocks";
  const std::string scales = "model.layers.2.mlp.experts.gate_up_proj_scales";
  std::int64_t bytes = 0;
  const Checkpoint whole(model);
  for (const auto& [name, tensor] : whole.tensors) bytes += static_cast<std::int64_t>(tensor.bytes);
  const Loaded loaded = load(model);
  EXPECT_EQ(loaded.model->weight_bytes(), bytes);
  EXPECT_EQ(loaded.model->parameters(), load(golden_model("gpt_oss")).model->parameters());
  // One token: every matrix but the embedding's, two experts of four, and no vector.
  std::int64_t read = 0;
  for (const auto& [name, tensor] : whole.tensors) {
    if (tensor.shape.size() < 2 || name.ends_with("bias") || name == "model.embed_tokens.weight") continue;
    const bool is_expert = name.find("experts") != std::string::npos;
    read += static_cast<std::int64_t>(tensor.bytes) / (is_expert ? 2 : 1);
  }
  EXPECT_EQ(loaded.model->token_weight_bytes(), read);

  Checkpoint without(model);
  without.tensors.erase(scales);
  expect_error(without.write(), ErrorCode::corrupt, scales);
  Checkpoint longer(model);
  longer.tensors.at(scales) = longer.tensors.at(blocks);
  expect_error(longer.write(), ErrorCode::corrupt, scales);
  Checkpoint signed_bytes(model);
  signed_bytes.tensors.at(blocks).dtype = DType::i8;
  expect_error(signed_bytes.write(), ErrorCode::unsupported, blocks);
  Checkpoint uneven(model);
  uneven.config["intermediate_size"] = 48;
  expect_error(uneven.write(), ErrorCode::corrupt, "multiples of 32");
}

// Rows of experts cannot be turned where elements share a block.
TEST(ModelTensors, TransposedExpertsMustBePlain) {
  Checkpoint mixed(golden_model("gpt_oss"));
  const std::string name = "model.layers.0.mlp.experts.down_proj";
  mixed.tensors.at(name).dtype = DType::f16;
  expect_error(mixed.write(), ErrorCode::unsupported, name);
}

TEST(ModelTensors, ATiedHeadMayBeStoredTwiceButMustAgree) {
  Checkpoint checkpoint(golden_model("llama"));
  checkpoint.config["tie_word_embeddings"] = true;
  checkpoint.tensors["lm_head.weight"] = checkpoint.tensors.at("model.embed_tokens.weight");
  EXPECT_TRUE(load(checkpoint.write()).model->config().tied_embeddings);

  weights::Tensor& head = checkpoint.tensors.at("lm_head.weight");
  std::vector<std::byte> changed(head.data, head.data + head.bytes);
  changed[7] ^= std::byte{1};
  head.data = changed.data();
  expect_error(checkpoint.write(), ErrorCode::corrupt, "lm_head.weight");
  expect_error(checkpoint.folder(), ErrorCode::corrupt, "model.safetensors: embeddings are tied");
}

TEST(ModelPath, FormsOfAModel) {
  Checkpoint checkpoint(golden_model("llama"));
  const fs::path folder = checkpoint.write();
  EXPECT_GT(load(folder).model->parameters(), 0);
  EXPECT_EQ(load(folder / "model.safetensors").model->parameters(), load(folder).model->parameters());

  expect_error(folder / "absent", ErrorCode::not_found, "absent");
  expect_error(folder / "config.json", ErrorCode::unsupported, ".gguf");
  fs::rename(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors");
  expect_error(folder, ErrorCode::not_found, "model.safetensors");
  std::ofstream(folder / "model.safetensors.index.json") << "{}";
  expect_error(folder, ErrorCode::corrupt, "weight_map");
}

TEST(ModelPath, ShardsLoadAsTheirWhole) {
  Checkpoint checkpoint(golden_model("llama"));
  const fs::path folder = checkpoint.write();
  const std::int64_t parameters = load(folder).model->parameters();
  fs::remove(folder / "model.safetensors");
  nlohmann::json index;
  std::vector<weights::Tensor> shards[2];
  for (const auto& [name, tensor] : checkpoint.tensors) {
    const bool second = name.starts_with("model.layers.1");
    shards[second].push_back(tensor);
    index["weight_map"][name] = second ? "b.safetensors" : "a.safetensors";
  }
  weights::write_safetensors(folder / "a.safetensors", shards[0]);
  weights::write_safetensors(folder / "b.safetensors", shards[1]);
  std::ofstream(folder / "model.safetensors.index.json") << index;
  EXPECT_EQ(load(folder).model->parameters(), parameters);
  fs::remove(folder / "b.safetensors");
  expect_error(folder, ErrorCode::not_found, "'b.safetensors'");
}

// Every matrix of a layer as F8_E4M3 with scales of blocks of 16 x 32.
TEST(ModelPath, F8WithBlockScalesLoads) {
  Checkpoint checkpoint(golden_model("llama"));
  const auto matrices = checkpoint.tensors;
  const std::vector<std::byte> bytes(1 << 20, std::byte{0x38});  // 1.0 in F8_E4M3
  const std::vector<float> scales(4096, 0.25f);
  for (const auto& [name, tensor] : matrices) {
    if (tensor.shape.size() != 2 || !name.starts_with("model.layers.")) continue;
    weights::Tensor& f8 = checkpoint.tensors.at(name);
    f8.dtype = DType::f8_e4m3;
    f8.data = bytes.data();
    f8.bytes = static_cast<std::uint64_t>(f8.shape[0] * f8.shape[1]);
    const std::int64_t rows = (f8.shape[0] + 15) / 16, columns = (f8.shape[1] + 31) / 32;
    checkpoint.tensors[name + "_scale_inv"] = {"",
                                               DType::f32,
                                               {rows, columns},
                                               reinterpret_cast<const std::byte*>(scales.data()),
                                               static_cast<std::uint64_t>(rows * columns * 4)};
  }
  const std::int64_t parameters = load(golden_model("llama")).model->parameters();
  expect_error(checkpoint.write(), ErrorCode::unsupported, "f8_e4m3");
  auto& quantisation = checkpoint.config["quantization_config"];
  quantisation = {{"quant_method", "fp8"},
                  {"fmt", "e4m3"},
                  {"activation_scheme", "dynamic"},
                  {"weight_block_size", {16, 32}}};
  EXPECT_EQ(load(checkpoint.write()).model->parameters(), parameters);
  quantisation["weight_block_size"] = {32, 32};
  expect_error(checkpoint.write(), ErrorCode::unsupported, "blocks of 32 x 32");
  for (const auto& [key, value] : std::map<std::string, nlohmann::json>{{"weight_block_size", {0, 32}},
                                                                        {"weight_block_size", 16},
                                                                        {"fmt", "e5m2"},
                                                                        {"activation_scheme", "static"},
                                                                        {"something", 1}}) {
    const nlohmann::json good = quantisation;
    quantisation[key] = value;
    expect_error(checkpoint.write(), ErrorCode::unsupported, "'" + key + "'");
    quantisation = good;
  }
}

TEST(ModelPath, TruncatedWeightsAreRefused) {
  Checkpoint checkpoint(golden_model("llama"));
  const fs::path file = checkpoint.write() / "model.safetensors";
  const auto size = fs::file_size(file);
  for (const auto kept : {size - 1, size / 2, std::uintmax_t{9}, std::uintmax_t{0}}) {
    fs::resize_file(file, kept);
    expect_error(checkpoint.folder(), ErrorCode::corrupt, "model.safetensors");
  }
}

}  // namespace
}  // namespace basin::models
