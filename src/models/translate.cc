#include "models/translate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "basin/base/error.h"
#include "models/decoder.h"
#include "models/translate_experts.h"
#include "ops/linear.h"
#include "weights/quantise.h"

namespace basin::models {
namespace {

constexpr std::array kOutside = {&TensorNames::embedding, &TensorNames::output_norm, &TensorNames::head};
// In a layer; projections are named without .weight and .bias.
constexpr std::array kNorms = {&TensorNames::attention_norm, &TensorNames::q_norm,
                               &TensorNames::k_norm,         &TensorNames::attention_post_norm,
                               &TensorNames::mlp_norm,       &TensorNames::mlp_post_norm};
constexpr std::array kProjections = {&TensorNames::q,    &TensorNames::k,     &TensorNames::v,
                                     &TensorNames::o,    &TensorNames::gate,  &TensorNames::up,
                                     &TensorNames::down, &TensorNames::router};

struct NewName {
  std::string name;
  bool is_norm;
};

// Every name of the model in one format, and what it is in the other; experts apart.
std::map<std::string, NewName> all_names(const TensorNames& from, const TensorNames& to, std::size_t layers) {
  std::map<std::string, NewName> names;
  for (const auto member : kOutside) names[from.*member] = {to.*member, member == &TensorNames::output_norm};
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto put = [&](const std::string& old, const std::string& other, const char* suffix, bool is_norm) {
      if (old.empty() || other.empty()) return;
      names[fmt::format("{}{}.{}{}", from.layer_prefix, layer, old, suffix)] = {
          fmt::format("{}{}.{}{}", to.layer_prefix, layer, other, suffix), is_norm};
    };
    for (const auto member : kNorms) put(from.*member, to.*member, "", true);
    put(from.sink_logit, to.sink_logit, "", false);
    for (const auto member : kProjections) {
      put(from.*member, to.*member, ".weight", false);
      put(from.*member, to.*member, ".bias", false);
    }
  }
  return names;
}

// A norm's weights as f32, with what the format adds to them.
Translated moved_norm(weights::Tensor tensor, float offset) {
  if (!weights::is_weight_type(tensor.dtype) || tensor.shape.size() != 1) return {std::move(tensor), {}, 1};
  const ops::WeightMatrix stored{tensor.data, tensor.dtype, 1, tensor.shape[0]};
  tensor.dtype = DType::f32;
  tensor.data = nullptr;
  return {std::move(tensor),
          [stored, offset](std::int64_t) {
            std::vector<float> values(static_cast<std::size_t>(stored.inputs));
            ops::widen_row(stored, 0, values.data());
            for (float& value : values) value += offset;
            std::vector<std::byte> bytes(4 * values.size());
            std::memcpy(bytes.data(), values.data(), bytes.size());
            return bytes;
          },
          1};
}

// With the rows of each head in the other format's order: GGUF rotates neighbours, Hugging Face halves.
Translated reordered(const weights::Tensor& tensor, std::int64_t heads, bool to_gguf) {
  Translated translated{tensor, {}, 1};
  translated.part = [tensor, heads, to_gguf](std::int64_t) {
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
  };
  return translated;
}

// The shortest decimal that gives the same float, as people write it: 1e-05, not 9.99999974e-06.
double as_written(double value) {
  return std::stod(fmt::format("{}", static_cast<float>(value)));
}

// The format says nothing of truncation: gpt-oss goes without, others with it.
bool is_known_yarn(const ModelConfig& config) {
  const ops::RopeConfig& rope = config.rope;
  return rope.beta_fast == 32.0 && rope.beta_slow == 1.0 &&
         rope.truncate == (config.architecture != "gpt_oss") && rope.attention_factor == 0.0 &&
         rope.mscale == 0.0 && rope.mscale_all_dim == 0.0;
}

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::unsupported,
              fmt::format("{}: {} cannot be translated between the formats", where, what),
              "keep the format: name an OUT of the same one");
}

// What one of the formats has no words for.
void check_config(const ModelConfig& config, const std::string& where) {
  if (config.rope.type == ops::RopeType::llama3) refuse(where, "RoPE of type llama3");
  if (config.rope.type == ops::RopeType::yarn && !is_known_yarn(config))
    refuse(where, "RoPE of type yarn with settings of its own");
  if (config.local_rope && config.local_rope->type != ops::RopeType::standard)
    refuse(where, "a scaled RoPE of local layers");
  if (config.activation_limit != ModelConfig().activation_limit)
    refuse(where, fmt::format("a swiglu_limit of {}", config.activation_limit));
}

bool is_gemma(const ModelConfig& config) {
  return config.architecture == "gemma3_text";
}

// The scale of scores that a GGUF file implies.
double implied_scale(const ModelConfig& config) {
  if (!is_gemma(config)) return 1.0 / std::sqrt(static_cast<double>(config.d_head));
  return gemma3_gguf_scale(config);
}

// n, where each n-th layer has full attention and all others a window; 0 where none has one.
std::int64_t full_every(const ModelConfig& config, const std::string& where) {
  const auto is_local = [&](std::size_t layer) { return config.layers[layer].window > 0; };
  std::size_t n = 1;
  while (n <= config.layers.size() && is_local(n - 1)) ++n;
  bool any = false;
  for (std::size_t layer = 0; layer < config.layers.size(); ++layer) {
    any = any || is_local(layer);
    if (is_local(layer) != ((layer + 1) % n != 0)) refuse(where, "windows of layers in no regular order");
  }
  return any ? static_cast<std::int64_t>(n) : 0;
}

std::int64_t window_of(const ModelConfig& config) {
  std::int64_t window = 0;
  for (const LayerAttention& layer : config.layers) window = std::max(window, layer.window);
  return window;
}

}  // namespace

std::vector<Translated> translate(const std::vector<weights::Tensor>& tensors,
                                  const Architecture& architecture, const ModelConfig& config, bool to_gguf,
                                  std::optional<DType> wanted) {
  if (architecture.gguf_names == nullptr || config.latent) {
    throw Error(ErrorCode::unsupported,
                fmt::format("the architecture '{}' cannot be translated between GGUF and safetensors",
                            config.architecture),
                "llama, qwen3, gpt_oss and gemma3_text can; within one format every model can be converted");
  }
  const TensorNames hugging_face = architecture.hugging_face_names(), gguf = architecture.gguf_names();
  const TensorNames& from = to_gguf ? hugging_face : gguf;
  const auto names = all_names(from, to_gguf ? gguf : hugging_face, config.layers.size());
  const float offset = to_gguf ? architecture.norm_offset : -architecture.norm_offset;
  const bool reorders = architecture.gguf_rope_layout == ops::RopeLayout::interleaved;
  std::vector<Translated> result;
  std::set<std::string> used;
  if (config.experts > 0) {
    std::map<std::string, weights::Tensor> by_name;
    for (const weights::Tensor& tensor : tensors) by_name.emplace(tensor.name, tensor);
    result = translate_experts(by_name, architecture, config, to_gguf, wanted, used);
  }
  for (const weights::Tensor& tensor : tensors) {
    if (used.contains(tensor.name)) continue;
    const auto name = names.find(tensor.name);
    if (name == names.end()) {
      throw Error(
          ErrorCode::unsupported,
          fmt::format("the tensor '{}' has no name in the other format that is known here", tensor.name));
    }
    weights::Tensor renamed = tensor;
    renamed.name = name->second.name;
    if (name->second.is_norm && offset != 0.0f) {
      result.push_back(moved_norm(std::move(renamed), offset));
    } else if (reorders && tensor.name.ends_with("." + from.q + ".weight")) {
      result.push_back(reordered(renamed, config.h_q, to_gguf));
    } else if (reorders && tensor.name.ends_with("." + from.k + ".weight")) {
      result.push_back(reordered(renamed, config.h_kv, to_gguf));
    } else {
      result.push_back({std::move(renamed), {}, 1});
    }
  }
  return result;
}

void add_gguf_config(const Architecture& architecture, const ModelConfig& config, const std::string& where,
                     weights::GgufMetadata& metadata) {
  check_config(config, where);
  if (std::abs(config.attention_scale / implied_scale(config) - 1.0) > 1e-6)
    refuse(where, fmt::format("a scale of scores of {}", config.attention_scale));
  const std::string prefix = std::string(architecture.gguf_name) + ".";
  const auto count = [&](const char* key, std::int64_t value) {
    metadata.set(prefix + key, static_cast<std::uint32_t>(value));
  };
  const auto number = [&](const char* key, double value) {
    metadata.set(prefix + key, static_cast<float>(value));
  };
  metadata.set("general.architecture", architecture.gguf_name);
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
  if (config.experts > 0) {
    count("expert_count", config.experts);
    count("expert_used_count", config.chosen_experts);
    count("expert_feed_forward_length", config.intermediate);
  }
  if (const std::int64_t every = full_every(config, where); every > 0) {
    count("attention.sliding_window", window_of(config));
    if (every != architecture.full_every) count("attention.sliding_window_pattern", every);
  }
  if (config.local_rope) number("rope.freq_base_swa", config.local_rope->theta);
  if (config.attention_softcap > 0) number("attn_logit_softcapping", config.attention_softcap);
  if (config.logit_softcap > 0) number("final_logit_softcapping", config.logit_softcap);
  if (config.rope.type == ops::RopeType::standard) return;
  metadata.set(prefix + "rope.scaling.type", config.rope.type == ops::RopeType::linear ? "linear" : "yarn");
  number("rope.scaling.factor", config.rope.factor);
  if (config.rope.type == ops::RopeType::yarn)
    count("rope.scaling.original_context_length", config.rope.original_context);
}

nlohmann::ordered_json hugging_face_config(const ModelConfig& config, const std::string& where) {
  check_config(config, where);
  static const std::map<std::string, const char*> kClasses = {{"llama", "LlamaForCausalLM"},
                                                              {"qwen3", "Qwen3ForCausalLM"},
                                                              {"gpt_oss", "GptOssForCausalLM"},
                                                              {"gemma3_text", "Gemma3ForCausalLM"}};
  nlohmann::ordered_json json;
  if (const auto found = kClasses.find(config.architecture); found != kClasses.end())
    json["architectures"] = {found->second};
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
  if (config.rope.type == ops::RopeType::yarn && !config.rope.truncate)
    json["rope_scaling"]["truncate"] = false;
  json["tie_word_embeddings"] = config.tied_embeddings;
  if (const std::int64_t window = window_of(config); window > 0) {
    json["sliding_window"] = window;
    auto& types = json["layer_types"];
    for (const LayerAttention& layer : config.layers)
      types.push_back(layer.window > 0 ? "sliding_attention" : "full_attention");
  }
  if (config.experts > 0) {
    json["num_local_experts"] = config.experts;
    json["num_experts_per_tok"] = config.chosen_experts;
    json["swiglu_limit"] = config.activation_limit;
  }
  if (is_gemma(config)) {
    const auto cap = [](double value) {
      return value > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
    };
    json["hidden_activation"] = "gelu_pytorch_tanh";
    const double width = as_written(1.0 / (config.attention_scale * config.attention_scale));
    json["query_pre_attn_scalar"] = width;
    if (width == std::round(width))
      json["query_pre_attn_scalar"] = std::llround(width);  // transformers refuses 256.0
    json["attn_logit_softcapping"] = cap(config.attention_softcap);
    json["final_logit_softcapping"] = cap(config.logit_softcap);
    json["rope_local_base_freq"] = as_written(config.local_rope->theta);
  } else {
    json["hidden_act"] = "silu";
  }
  json["attention_bias"] = config.architecture == "gpt_oss";
  if (config.architecture == "llama") json["mlp_bias"] = false;
  return json;
}

}  // namespace basin::models
