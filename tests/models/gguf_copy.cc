#include "models/gguf_copy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numbers>
#include <stdexcept>
#include <vector>

#include "weights/gguf_bytes.h"

namespace basin::test {
namespace {

using nlohmann::json;

constexpr std::uint32_t kTypeU32 = 4, kTypeF32 = 6, kTypeText = 8;

using Renamed = std::map<std::string, std::string>;

const Renamed kInLayer = {{"input_layernorm", "attn_norm"},    {"self_attn.q_proj", "attn_q"},
                          {"self_attn.k_proj", "attn_k"},      {"self_attn.v_proj", "attn_v"},
                          {"self_attn.o_proj", "attn_output"}, {"self_attn.q_norm", "attn_q_norm"},
                          {"self_attn.k_norm", "attn_k_norm"}, {"post_attention_layernorm", "ffn_norm"},
                          {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
                          {"mlp.down_proj", "ffn_down"}};

// What an architecture calls otherwise.
const std::map<std::string, Renamed> kOwnInLayer = {{"gpt-oss",
                                                     {{"post_attention_layernorm", "post_attention_norm"},
                                                      {"mlp.router", "ffn_gate_inp"},
                                                      {"mlp.experts.down_proj", "ffn_down_exps"}}},
                                                    {"gemma3",
                                                     {{"post_attention_layernorm", "post_attention_norm"},
                                                      {"pre_feedforward_layernorm", "ffn_norm"},
                                                      {"post_feedforward_layernorm", "post_ffw_norm"}}}};

std::string gguf_architecture(const std::string& model_type) {
  return model_type == "gpt_oss" ? "gpt-oss" : model_type == "gemma3_text" ? "gemma3" : model_type;
}

std::string gguf_name(const std::string& name, const std::string& architecture) {
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  if (name == "lm_head.weight") return "output.weight";
  if (name == "rope_freqs.weight") return name;
  const std::string prefix = "model.layers.";
  const std::size_t dot = name.find('.', prefix.size());
  const std::string block = "blk." + name.substr(prefix.size(), dot - prefix.size()) + ".";
  const std::string rest = name.substr(dot + 1);
  if (rest == "self_attn.sinks") return block + "attn_sinks.weight";
  const std::size_t suffix = rest.rfind('.');  // .weight or .bias
  const std::string what = rest.substr(0, suffix);
  const auto own = kOwnInLayer.find(architecture);
  if (own != kOwnInLayer.end() && own->second.contains(what))
    return block + own->second.at(what) + rest.substr(suffix);
  if (kInLayer.contains(what)) return block + kInLayer.at(what) + rest.substr(suffix);
  throw std::runtime_error("no GGUF name for " + name);
}

std::string bytes_of(const weights::Tensor& tensor) {
  return {reinterpret_cast<const char*>(tensor.data), tensor.bytes};
}

// llama.cpp: reshape(heads, 2, d/2, inputs).swapaxes(1, 2): row 2 i of a head is the old i, row 2 i + 1 the old i + d/2.
std::string permuted(const weights::Tensor& tensor, std::int64_t heads) {
  const std::string from = bytes_of(tensor);
  const auto d = static_cast<std::size_t>(tensor.shape[0] / heads);
  const std::size_t row = from.size() / static_cast<std::size_t>(tensor.shape[0]);
  std::string to(from.size(), '\0');
  for (std::size_t head = 0; head < static_cast<std::size_t>(heads); ++head) {
    for (std::size_t i = 0; i < d; ++i) {
      const std::size_t old = i / 2 + (i % 2) * (d / 2);
      std::memcpy(to.data() + (head * d + i) * row, from.data() + (head * d + old) * row, row);
    }
  }
  return to;
}

// Every value, plus `offset`.
std::string as_f32(const weights::Tensor& tensor, float offset) {
  std::string out;
  const auto size = static_cast<std::size_t>(block_bytes(tensor.dtype));
  for (std::size_t i = 0; i < tensor.bytes; i += size) {
    bf16 half{};
    float value = 0;
    if (tensor.dtype == DType::bf16) {
      std::memcpy(&half, tensor.data + i, 2);
      value = to_float(half);
    } else if (tensor.dtype == DType::f32) {
      std::memcpy(&value, tensor.data + i, 4);
    } else {
      throw std::runtime_error("a vector that is neither f32 nor bf16");
    }
    out += little_endian(value + offset);
  }
  return out;
}

std::uint32_t gguf_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0;
    case DType::f16:
      return 1;
    case DType::bf16:
      return 30;
    case DType::mxfp4:
      return 39;
    default:
      throw std::runtime_error("no GGUF type");
  }
}

struct GgufTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // outermost first
  DType dtype;
  std::string data;
};

// Takes every `step`th row from `first` on, of all experts.
GgufTensor every(const GgufTensor& from, const std::string& name, std::size_t first, std::size_t step) {
  GgufTensor to{name, from.shape, from.dtype, {}};
  to.shape[1] /= static_cast<std::int64_t>(step);
  const auto rows = static_cast<std::size_t>(from.shape[0] * from.shape[1]);
  const std::size_t bytes = from.data.size() / rows;
  for (std::size_t row = first; row < rows; row += step) to.data += from.data.substr(row * bytes, bytes);
  return to;
}

// [experts, inputs, outputs] to [experts, outputs, inputs].
GgufTensor transposed(const weights::Tensor& tensor) {
  const std::string from = bytes_of(tensor);
  const auto inputs = static_cast<std::size_t>(tensor.shape[1]),
             outputs = static_cast<std::size_t>(tensor.shape[2]);
  const auto size = static_cast<std::size_t>(block_bytes(tensor.dtype));
  GgufTensor to{"", {tensor.shape[0], tensor.shape[2], tensor.shape[1]}, tensor.dtype, {}};
  for (std::size_t e = 0; e < static_cast<std::size_t>(tensor.shape[0]); ++e) {
    for (std::size_t o = 0; o < outputs; ++o) {
      for (std::size_t i = 0; i < inputs; ++i)
        to.data += from.substr(((e * inputs + i) * outputs + o) * size, size);
    }
  }
  return to;
}

// Elements 2 i and 2 i + 1 share a byte in the published layout, i and i + 16 in a GGUF block.
GgufTensor mxfp4(const weights::Tensor& blocks, const weights::Tensor& scales) {
  const std::string from = bytes_of(blocks), scale = bytes_of(scales);
  GgufTensor to{"", {blocks.shape[0], blocks.shape[1], blocks.shape[2] * 32}, DType::mxfp4, {}};
  for (std::size_t block = 0; block < scale.size(); ++block) {
    unsigned codes[32];
    for (std::size_t i = 0; i < 32; ++i) {
      const auto byte = static_cast<unsigned char>(from[block * 16 + i / 2]);
      codes[i] = i % 2 == 0 ? byte & 15u : byte >> 4u;
    }
    to.data += scale[block];
    for (std::size_t i = 0; i < 16; ++i) to.data += static_cast<char>(codes[i] | codes[i + 16] << 4u);
  }
  return to;
}

// The tensors of gpt-oss's experts, whose gate and up outputs alternate in one. False for other tensors.
bool add_experts(const Checkpoint& checkpoint, const std::string& name, std::vector<GgufTensor>& list) {
  const std::string experts = ".mlp.experts.";
  const std::size_t at = name.find(experts);
  if (at == std::string::npos) return false;
  const std::string prefix = "model.layers.";
  const std::string block = "blk." + name.substr(prefix.size(), at - prefix.size()) + ".";
  const std::string rest = name.substr(at + experts.size());
  const weights::Tensor& tensor = checkpoint.tensors.at(name);
  if (rest.ends_with("_scales")) return true;  // beside its blocks
  if (rest.ends_with("_bias")) {
    // Each value a row of its own, so that gate and up part.
    const GgufTensor bias{"", {tensor.shape[0], tensor.shape[1]}, DType::f32, as_f32(tensor, 0)};
    if (rest == "down_proj_bias") {
      list.push_back(every(bias, block + "ffn_down_exps.bias", 0, 1));
    } else {
      list.push_back(every(bias, block + "ffn_gate_exps.bias", 0, 2));
      list.push_back(every(bias, block + "ffn_up_exps.bias", 1, 2));
    }
    return true;
  }
  const bool quantised = rest.ends_with("_blocks");
  const std::string scales = name.substr(0, name.size() - 6) + "scales";
  const GgufTensor matrix = quantised ? mxfp4(tensor, checkpoint.tensors.at(scales)) : transposed(tensor);
  if (rest.starts_with("down_proj")) {
    list.push_back(every(matrix, block + "ffn_down_exps.weight", 0, 1));
  } else {
    list.push_back(every(matrix, block + "ffn_gate_exps.weight", 0, 2));
    list.push_back(every(matrix, block + "ffn_up_exps.weight", 1, 2));
  }
  return true;
}

void add_rope(const json& rope, const std::string& prefix, GgufBytes& file) {
  const auto number = [&](const char* key, const char* from) {
    file.metadata.push_back(gguf_key(prefix + key, kTypeF32, little_endian(rope.at(from).get<float>())));
  };
  number("rope.freq_base", "rope_theta");
  const std::string type = rope.at("rope_type");
  if (type == "default" || type == "llama3") return;  // llama3: a tensor says all
  if (type != "linear" && type != "yarn") throw std::runtime_error("no GGUF metadata for RoPE type " + type);
  file.metadata.push_back(gguf_key(prefix + "rope.scaling.type", kTypeText, gguf_string(type)));
  number("rope.scaling.factor", "factor");
  if (type == "yarn") {
    const auto original = rope.at("original_max_position_embeddings").get<std::uint32_t>();
    file.metadata.push_back(
        gguf_key(prefix + "rope.scaling.original_context_length", kTypeU32, u32(original)));
  }
}

// What the converter divides each frequency of Llama 3.1 by: 1 for short waves, the factor for long ones.
GgufTensor llama3_divisors(const json& config) {
  const json& rope = config.at("rope_parameters");
  const auto number = [&](const char* key) { return rope.at(key).get<double>(); };
  const std::int64_t pairs = config.at("head_dim").get<std::int64_t>() / 2;
  GgufTensor tensor{"rope_freqs.weight", {pairs}, DType::f32, {}};
  for (std::int64_t i = 0; i < pairs; ++i) {
    const double frequency =
        std::pow(number("rope_theta"), -static_cast<double>(i) / static_cast<double>(pairs));
    const double turns = number("original_max_position_embeddings") * frequency / (2 * std::numbers::pi);
    const double low = number("low_freq_factor"), high = number("high_freq_factor");
    const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    const double kept = (1 - smooth) / number("factor") + smooth;
    tensor.data += little_endian(static_cast<float>(1 / kept));
  }
  return tensor;
}

std::vector<GgufTensor> make_tensors(const Checkpoint& checkpoint, const std::string& architecture) {
  const json& config = checkpoint.config;
  std::vector<GgufTensor> list;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    if (add_experts(checkpoint, name, list)) continue;
    const bool vector = tensor.shape.size() == 1;
    const float offset = architecture == "gemma3" && name.ends_with("norm.weight") ? 1.0f : 0.0f;
    std::string data = vector ? as_f32(tensor, offset) : bytes_of(tensor);
    if (architecture == "llama" && name.ends_with("q_proj.weight"))
      data = permuted(tensor, config.at("num_attention_heads"));
    if (architecture == "llama" && name.ends_with("k_proj.weight"))
      data = permuted(tensor, config.at("num_key_value_heads"));
    list.push_back({gguf_name(name, architecture), tensor.shape, vector ? DType::f32 : tensor.dtype, data});
  }
  const json& rope = config.at("rope_parameters");
  if (rope.contains("rope_type") && rope.at("rope_type") == "llama3") list.push_back(llama3_divisors(config));
  return list;
}

}  // namespace

std::string gguf_copy(const Checkpoint& checkpoint) {
  const json& config = checkpoint.config;
  const std::string architecture = gguf_architecture(config.at("model_type")), prefix = architecture + ".";
  GgufBytes file;
  file.metadata.push_back(gguf_key("general.architecture", kTypeText, gguf_string(architecture)));
  const auto count = [&](const char* key, const char* from) {
    file.metadata.push_back(gguf_key(prefix + key, kTypeU32, u32(config.at(from).get<std::uint32_t>())));
  };
  count("embedding_length", "hidden_size");
  count("feed_forward_length", "intermediate_size");
  count("block_count", "num_hidden_layers");
  count("context_length", "max_position_embeddings");
  count("attention.head_count", "num_attention_heads");
  count("attention.head_count_kv", "num_key_value_heads");
  count("attention.key_length", "head_dim");
  count("attention.value_length", "head_dim");
  count("vocab_size", "vocab_size");
  if (architecture == "gpt-oss") {
    count("attention.sliding_window", "sliding_window");
    count("expert_count", "num_local_experts");
    count("expert_used_count", "num_experts_per_tok");
    count("expert_feed_forward_length", "intermediate_size");
  } else if (architecture == "gemma3") {
    count("attention.sliding_window", "sliding_window");
  } else {
    count("rope.dimension_count", "head_dim");
  }
  file.metadata.push_back(gguf_key(prefix + "attention.layer_norm_rms_epsilon", kTypeF32,
                                   little_endian(config.at("rms_norm_eps").get<float>())));
  const json& rope = config.at("rope_parameters");
  add_rope(rope.contains("full_attention") ? rope.at("full_attention") : rope, prefix, file);

  for (const GgufTensor& tensor : make_tensors(checkpoint, architecture)) {
    const std::vector<std::uint64_t> dimensions(tensor.shape.rbegin(), tensor.shape.rend());
    file.tensors.push_back(gguf_tensor(tensor.name, dimensions, gguf_type(tensor.dtype), file.data.size()));
    file.data += tensor.data;
    file.data.resize((file.data.size() + file.alignment - 1) / file.alignment * file.alignment, '\0');
  }
  return file.bytes();
}

}  // namespace basin::test
