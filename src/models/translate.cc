#include "models/translate.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "models/decoder.h"

namespace basin::models {
namespace {

constexpr std::array kOutside = {&TensorNames::embedding, &TensorNames::output_norm, &TensorNames::head};
// In a layer; projections are named without the .weight.
constexpr std::array kNorms = {&TensorNames::attention_norm, &TensorNames::q_norm, &TensorNames::k_norm,
                               &TensorNames::mlp_norm};
constexpr std::array kProjections = {&TensorNames::q,    &TensorNames::k,  &TensorNames::v,   &TensorNames::o,
                                     &TensorNames::gate, &TensorNames::up, &TensorNames::down};

// Every name of the model in one format, and what it is in the other.
std::map<std::string, std::string> all_names(const TensorNames& from, const TensorNames& to,
                                             std::size_t layers) {
  std::map<std::string, std::string> names;
  for (const auto member : kOutside) names[from.*member] = to.*member;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto put = [&](const std::string& old, const std::string& other, const char* suffix) {
      names[fmt::format("{}{}.{}{}", from.layer_prefix, layer, old, suffix)] =
          fmt::format("{}{}.{}{}", to.layer_prefix, layer, other, suffix);
    };
    for (const auto member : kNorms) put(from.*member, to.*member, "");
    for (const auto member : kProjections) put(from.*member, to.*member, ".weight");
  }
  return names;
}

// The shortest decimal that gives the same float, as people write it: 1e-05, not 9.99999974e-06.
double as_written(double value) {
  return std::stod(fmt::format("{}", static_cast<float>(value)));
}

bool is_default_yarn(const ops::RopeConfig& rope) {
  return rope.beta_fast == 32.0 && rope.beta_slow == 1.0 && rope.truncate && rope.attention_factor == 0.0 &&
         rope.mscale == 0.0 && rope.mscale_all_dim == 0.0;
}

void check_rope(const ops::RopeConfig& rope, const std::string& where) {
  const char* what = rope.type == ops::RopeType::llama3 ? "llama3"
                     : rope.type == ops::RopeType::yarn && !is_default_yarn(rope)
                         ? "yarn with settings of its own"
                         : nullptr;
  if (what != nullptr) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: RoPE of type {} cannot be translated between the formats", where, what),
                "keep the format: name an OUT of the same one");
  }
}

}  // namespace

std::vector<Translated> translate(const std::vector<weights::Tensor>& tensors,
                                  const Architecture& architecture, const ModelConfig& config, bool to_gguf) {
  // Others change values, too: Gemma's norms are stored with one added in GGUF.
  if (config.architecture != "llama" && config.architecture != "qwen3") {
    throw Error(ErrorCode::unsupported,
                fmt::format("the architecture '{}' cannot be translated between GGUF and safetensors",
                            config.architecture),
                "llama and qwen3 can; within one format every model can be converted");
  }
  const TensorNames hugging_face = architecture.hugging_face_names(), gguf = architecture.gguf_names();
  const TensorNames& from = to_gguf ? hugging_face : gguf;
  const auto names = all_names(from, to_gguf ? gguf : hugging_face, config.layers.size());
  const bool reorders = architecture.gguf_rope_layout == ops::RopeLayout::interleaved;
  std::vector<Translated> result;
  for (const weights::Tensor& tensor : tensors) {
    const auto name = names.find(tensor.name);
    if (name == names.end()) {
      throw Error(
          ErrorCode::unsupported,
          fmt::format("the tensor '{}' has no name in the other format that is known here", tensor.name));
    }
    Translated translated{tensor, 0};
    translated.tensor.name = name->second;
    if (reorders && tensor.name.ends_with("." + from.q + ".weight")) translated.heads = config.h_q;
    if (reorders && tensor.name.ends_with("." + from.k + ".weight")) translated.heads = config.h_kv;
    result.push_back(std::move(translated));
  }
  return result;
}

std::vector<std::byte> reordered(const weights::Tensor& tensor, std::int64_t heads, bool to_gguf) {
  const std::int64_t d = tensor.shape.at(0) / heads;
  const std::uint64_t row_bytes = tensor.bytes / static_cast<std::uint64_t>(tensor.shape[0]);
  std::vector<std::byte> rows(tensor.bytes);
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t i = 0; i < d; ++i) {
      // Row i of a head of GGUF, and where it lies with Hugging Face.
      const std::int64_t half = i / 2 + i % 2 * (d / 2);
      const std::int64_t source = to_gguf ? half : i, target = to_gguf ? i : half;
      std::memcpy(rows.data() + static_cast<std::uint64_t>(head * d + target) * row_bytes,
                  tensor.data + static_cast<std::uint64_t>(head * d + source) * row_bytes, row_bytes);
    }
  }
  return rows;
}

void add_gguf_config(const ModelConfig& config, const std::string& where, weights::GgufMetadata& metadata) {
  check_rope(config.rope, where);
  const std::string prefix = config.architecture + ".";
  const auto count = [&](const char* key, std::int64_t value) {
    metadata.set(prefix + key, static_cast<std::uint32_t>(value));
  };
  const auto number = [&](const char* key, double value) {
    metadata.set(prefix + key, static_cast<float>(value));
  };
  metadata.set("general.architecture", config.architecture);
  metadata.set("general.type", "model");
  count("block_count", static_cast<std::int64_t>(config.layers.size()));
  count("context_length", config.context);
  count("embedding_length", config.hidden);
  count("feed_forward_length", config.intermediate);
  count("attention.head_count", config.h_q);
  count("attention.head_count_kv", config.h_kv);
  count("attention.key_length", config.d_head);
  count("attention.value_length", config.d_head);
  count("rope.dimension_count", config.rope.rotary_dim);
  count("vocab_size", config.vocabulary);
  number("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  number("rope.freq_base", config.rope.theta);
  if (config.rope.type == ops::RopeType::standard) return;
  metadata.set(prefix + "rope.scaling.type", config.rope.type == ops::RopeType::linear ? "linear" : "yarn");
  number("rope.scaling.factor", config.rope.factor);
  if (config.rope.type == ops::RopeType::yarn)
    count("rope.scaling.original_context_length", config.rope.original_context);
}

nlohmann::ordered_json hugging_face_config(const ModelConfig& config, const std::string& where) {
  check_rope(config.rope, where);
  nlohmann::ordered_json json;
  json["architectures"] = {config.architecture == "qwen3" ? "Qwen3ForCausalLM" : "LlamaForCausalLM"};
  json["model_type"] = config.architecture;
  json["vocab_size"] = config.vocabulary;
  json["hidden_size"] = config.hidden;
  json["intermediate_size"] = config.intermediate;
  json["num_hidden_layers"] = config.layers.size();
  json["num_attention_heads"] = config.h_q;
  json["num_key_value_heads"] = config.h_kv;
  json["head_dim"] = config.d_head;
  json["max_position_embeddings"] = config.context;
  json["rms_norm_eps"] = as_written(config.rms_norm_eps);
  json["rope_theta"] = as_written(config.rope.theta);
  if (config.rope.type != ops::RopeType::standard) {
    auto& scaling = json["rope_scaling"];
    scaling["rope_type"] = config.rope.type == ops::RopeType::linear ? "linear" : "yarn";
    scaling["factor"] = as_written(config.rope.factor);
    if (config.rope.type == ops::RopeType::yarn)
      scaling["original_max_position_embeddings"] = config.rope.original_context;
  }
  json["tie_word_embeddings"] = config.tied_embeddings;
  json["hidden_act"] = "silu";
  json["attention_bias"] = false;
  json["mlp_bias"] = false;
  return json;
}

}  // namespace basin::models
