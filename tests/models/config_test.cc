// What a config.json may say: both spellings of RoPE, and one clear error for everything hostile or not supported.
#include <gtest/gtest.h>

#include <fstream>

#include "models/checkpoint.h"
#include "models/expect_error.h"
#include "models/model.h"

namespace basin::models {
namespace {

using nlohmann::json;
using test::Checkpoint;
using test::expect_error;
using test::golden_model;

struct Refusal {
  const char* family;
  const char* patch;  // merged into config.json; null removes a key
  ErrorCode code;
  const char* named;
};

constexpr ErrorCode kCorrupt = ErrorCode::corrupt, kUnsupported = ErrorCode::unsupported;

const Refusal kRefusals[] = {
    {"llama", R"({"attention_bias": true})", kUnsupported, "attention_bias"},
    {"llama", R"({"mlp_bias": true})", kUnsupported, "mlp_bias"},
    {"llama", R"({"hidden_act": "gelu"})", kUnsupported, "gelu"},
    {"llama", R"({"sliding_window": 128})", kUnsupported, "sliding_window"},
    {"llama", R"({"partial_rotary_factor": 0.5})", kUnsupported, "partial_rotary_factor"},
    {"llama", R"({"quantization_config": {"bits": 4}})", kUnsupported, "quantization_config"},
    {"llama", R"({"num_experts": 8})", kUnsupported, "num_experts"},
    {"llama", R"({"num_local_experts": 8})", kUnsupported, "num_local_experts"},
    {"llama", R"({"attn_logit_softcapping": 50.0})", kUnsupported, "attn_logit_softcapping"},
    {"llama", R"({"final_logit_softcapping": 30.0})", kUnsupported, "final_logit_softcapping"},
    {"llama", R"({"layer_types": ["sliding_attention"]})", kUnsupported, "sliding_attention"},
    {"llama", R"({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})", kUnsupported, "dynamic"},
    {"llama", R"({"rope_parameters": null, "rope_scaling": {"type": "longrope", "factor": 2.0}})",
     kUnsupported, "longrope"},
    {"llama", R"({"rope_parameters": null, "rope_scaling": {"rope_type": "linear"}})", kCorrupt, "factor"},
    {"llama", R"({"rope_parameters": {"surprise": 2}})", kUnsupported, "surprise"},
    {"llama", R"({"rope_theta": 7.0})", kCorrupt, "rope_theta"},
    {"llama", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})", kUnsupported,
     "partial_rotary_factor"},
    {"llama", R"({"rope_parameters": [1]})", kCorrupt, "rope_parameters"},
    {"llama", R"({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})", kCorrupt, "differ"},
    {"llama", R"({"rope_parameters": {"rope_theta": 0}})", kCorrupt, "theta"},
    {"llama", R"({"rope_parameters": {"rope_theta": "big"}})", kCorrupt, "rope_theta"},
    {"llama", R"({"rope_parameters": {"rope_theta": 1}})", kCorrupt, "rope theta is 1"},
    {"llama", R"({"rope_parameters": {"rope_theta": 1e300, "factor": 1e300}})", kCorrupt, "pair"},
    {"llama", R"({"rope_parameters": {"factor": 0.5}})", kCorrupt, "rope factor is 0.5"},
    {"llama", R"({"rope_parameters": {"low_freq_factor": 5}})", kCorrupt, "low_freq_factor"},
    {"llama", R"({"rope_parameters": null, "rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}})",
     kCorrupt, "rope theta is 1"},
    {"llama", R"({"rope_parameters": null, "rope_scaling": {"type": "yarn", "factor": 4,
                  "original_max_position_embeddings": 1}})",
     kCorrupt, "original context 1"},
    {"llama", R"({"rope_parameters": null, "rope_scaling": {"type": "yarn", "factor": 4,
                  "attention_factor": -1}})",
     kCorrupt, "attention factor is -1"},
    {"llama", R"({"rope_parameters": null, "rope_scaling": {"type": "yarn", "factor": 4,
                  "attention_factor": 0}})",
     kCorrupt, "'attention_factor' is 0"},
    {"llama", R"({"rope_parameters": {"type": "default"}})", kCorrupt, "'type' is \"default\""},
    {"llama", R"({"layer_types": ["full_attention", "full_attention"]})", kCorrupt, "lists 2 layers"},
    {"qwen3", R"({"layer_types": []})", kCorrupt, "lists 0 layers"},
    {"qwen3", R"({"layer_types": "full_attention"})", kCorrupt, "layer_types"},
    {"qwen3", R"({"use_sliding_window": true})", kUnsupported, "use_sliding_window"},
    {"gpt_oss", R"({"attention_bias": false})", kUnsupported, "attention_bias"},
    {"gpt_oss", R"({"hidden_act": "gelu_pytorch_tanh"})", kUnsupported, "gelu_pytorch_tanh"},
    {"gpt_oss", R"({"quantization_config": {"quant_method": "gptq"}})", kUnsupported, "gptq"},
    {"gpt_oss", R"({"quantization_config": 4})", kCorrupt, "quantization_config"},
    {"gpt_oss", R"({"num_local_experts": null})", kCorrupt, "num_local_experts"},
    {"gpt_oss", R"({"num_local_experts": 5})", kCorrupt, "router"},
    {"gpt_oss", R"({"num_experts_per_tok": 5})", kCorrupt, "5 of 4 experts"},
    {"gpt_oss", R"({"swiglu_limit": -1})", kCorrupt, "swiglu_limit"},
    {"gpt_oss", R"({"sliding_window": null})", kCorrupt, "sliding_window"},
    {"gpt_oss", R"({"final_logit_softcapping": 30.0})", kUnsupported, "final_logit_softcapping"},
    {"gpt_oss", R"({"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
                                    "sliding_attention"]})",
     kUnsupported, "all of 4 layers have a window"},
    {"gpt_oss", R"({"layer_types": ["full_attention", "chunked_attention"]})", kUnsupported,
     "chunked_attention"},
    {"gemma3_text", R"({"use_bidirectional_attention": true})", kUnsupported, "use_bidirectional_attention"},
    {"gemma3_text", R"({"hidden_activation": "gelu"})", kUnsupported, "gelu_pytorch_tanh"},
    {"gemma3_text", R"({"query_pre_attn_scalar": 0})", kCorrupt, "query_pre_attn_scalar"},
    {"gemma3_text", R"({"final_logit_softcapping": -30.0})", kCorrupt, "final_logit_softcapping"},
    {"gemma3_text", R"({"attn_logit_softcapping": "much"})", kCorrupt, "attn_logit_softcapping"},
    {"gemma3_text", R"({"attention_bias": true})", kUnsupported, "attention_bias"},
    {"gemma3_text", R"({"rope_parameters": {"full_attention": {"surprise": 1}}})", kUnsupported, "surprise"},
    {"gemma3_text", R"({"rope_parameters": {"sliding_attention": {"rope_theta": 0}}})", kCorrupt, "theta"},
    {"gemma3_text", R"({"rope_parameters": {"sliding_attention": 7}})", kCorrupt, "sliding_attention"},
    {"llama", R"({"model_type": "mamba"})", kUnsupported, "mamba"},
    {"llama", R"({"model_type": "mamba2"})", kUnsupported, "llama, qwen3"},
    {"llama", R"({"model_type": null})", kCorrupt, "model_type"},
    {"llama", R"({"model_type": 3})", kCorrupt, "model_type"},
    {"llama", R"({"vocab_size": 0})", kCorrupt, "vocab_size"},
    {"llama", R"({"vocab_size": 321})", kCorrupt, "embed_tokens"},
    {"llama", R"({"hidden_size": -64})", kCorrupt, "hidden_size"},
    {"llama", R"({"hidden_size": 1e99})", kCorrupt, "hidden_size"},
    {"llama", R"({"hidden_size": 18446744073709551615})", kCorrupt, "hidden_size"},
    {"llama", R"({"hidden_size": "64"})", kCorrupt, "hidden_size"},
    {"llama", R"({"hidden_size": 64.5})", kCorrupt, "hidden_size"},
    {"llama", R"({"hidden_size": null})", kCorrupt, "hidden_size"},
    {"llama", R"({"intermediate_size": []})", kCorrupt, "intermediate_size"},
    {"llama", R"({"intermediate_size": 4294967296})", kCorrupt, "intermediate_size"},
    {"llama", R"({"num_attention_heads": 0})", kCorrupt, "num_attention_heads"},
    {"llama", R"({"num_attention_heads": 5, "num_key_value_heads": 3})", kCorrupt, "not a multiple"},
    {"llama", R"({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": null})", kCorrupt, "heads"},
    {"llama", R"({"head_dim": 15})", kCorrupt, "even"},
    {"llama", R"({"head_dim": 18})", kCorrupt, "q_proj"},
    {"llama", R"({"num_hidden_layers": 2147483647})", kCorrupt, "layers"},
    {"llama", R"({"num_hidden_layers": 2})", kUnsupported, "model.layers.2"},
    {"llama", R"({"num_hidden_layers": 4})", kCorrupt, "model.layers.3"},
    {"llama", R"({"max_position_embeddings": 0})", kCorrupt, "max_position_embeddings"},
    {"llama", R"({"rms_norm_eps": -1})", kCorrupt, "epsilon"},
    {"llama", R"({"rms_norm_eps": true})", kCorrupt, "rms_norm_eps"},
    {"llama", R"({"tie_word_embeddings": "yes"})", kCorrupt, "tie_word_embeddings"},
};

TEST(ModelConfigRefused, OneClearErrorEach) {
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.patch);
    Checkpoint checkpoint(golden_model(refusal.family));
    checkpoint.config.merge_patch(json::parse(refusal.patch));
    expect_error(checkpoint.write(), refusal.code, refusal.named);
    expect_error(checkpoint.folder(), refusal.code, checkpoint.folder().string());
  }
}

TEST(ModelConfigRefused, AKeyThatStandsTwice) {
  Checkpoint checkpoint(golden_model("llama"));
  const auto& folder = checkpoint.write();
  const std::string config = checkpoint.config.dump();
  for (const std::string& first :
       {std::string(R"({"rms_norm_eps": 0.5,)"), std::string(R"({"vocab_size": 320,)")}) {
    std::ofstream(folder / "config.json") << first << config.substr(1);
    expect_error(folder, kCorrupt, first.substr(2, first.find(':') - 3) + "' twice");
  }
}

TEST(ModelConfigRefused, FilesThatAreNoConfig) {
  Checkpoint checkpoint(golden_model("llama"));
  const auto& folder = checkpoint.write();
  for (const std::string& text : {std::string(), std::string("[1, 2]"), std::string("{\"a\": "),
                                  "{\"a\":" + std::string(100000, '[')}) {
    std::ofstream(folder / "config.json") << text;
    expect_error(folder, ErrorCode::corrupt, "config.json");
  }
  std::filesystem::remove(folder / "config.json");
  expect_error(folder, ErrorCode::not_found, "config.json");
}

TEST(ModelConfig, ReadsBothSpellingsOfRope) {
  for (const char* type : {"llama3", "yarn", "linear"}) {
    Checkpoint newer(golden_model("llama")), older(golden_model("llama"));
    json section = {{"rope_type", type}, {"factor", 8.0}, {"original_max_position_embeddings", 64}};
    if (section["rope_type"] == "llama3")
      section.update({{"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}});
    if (section["rope_type"] == "linear") section.erase("original_max_position_embeddings");
    older.config.erase("rope_parameters");
    older.config["rope_scaling"] = section;
    older.config["rope_theta"] = 12345.0;
    section["rope_theta"] = 12345.0;
    newer.config["rope_parameters"] = section;
    const Loaded a = load(newer.write()), b = load(older.write());
    const ops::RopeConfig &x = a.model->config().rope, &y = b.model->config().rope;
    EXPECT_EQ(x.theta, 12345.0);
    EXPECT_EQ(x.theta, y.theta);
    EXPECT_EQ(x.type, y.type);
    EXPECT_NE(x.type, ops::RopeType::standard);
    EXPECT_EQ(x.factor, 8.0);
    EXPECT_EQ(x.factor, y.factor);
    EXPECT_EQ(x.original_context, y.original_context);
  }
}

TEST(ModelConfig, HarmlessKeysDoNotMatter) {
  Checkpoint checkpoint(golden_model("llama"));
  checkpoint.config.merge_patch(json::parse(R"({"torch_dtype": "bfloat16", "attention_dropout": 0.0,
    "pretraining_tp": 1, "use_cache": true, "sliding_window": null, "quantization_config": null,
    "transformers.js_config": {"dtype": "q4"}})"));
  EXPECT_EQ(load(checkpoint.write()).model->config().architecture, "llama");
}

}  // namespace
}  // namespace basin::models
