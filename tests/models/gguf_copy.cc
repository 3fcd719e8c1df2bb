#include "models/gguf_copy.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "weights/gguf_bytes.h"

namespace basin::test {
namespace {

using nlohmann::json;

constexpr std::uint32_t kTypeU32 = 4, kTypeF32 = 6, kTypeText = 8;

struct Renamed {
  const char* hugging_face;
  const char* gguf;
};
constexpr std::array<Renamed, 11> kInLayer = {{{"input_layernorm", "attn_norm"},
                                               {"self_attn.q_proj", "attn_q"},
                                               {"self_attn.k_proj", "attn_k"},
                                               {"self_attn.v_proj", "attn_v"},
                                               {"self_attn.o_proj", "attn_output"},
                                               {"self_attn.q_norm", "attn_q_norm"},
                                               {"self_attn.k_norm", "attn_k_norm"},
                                               {"post_attention_layernorm", "ffn_norm"},
                                               {"mlp.gate_proj", "ffn_gate"},
                                               {"mlp.up_proj", "ffn_up"},
                                               {"mlp.down_proj", "ffn_down"}}};

std::string gguf_name(const std::string& name) {
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  if (name == "lm_head.weight") return "output.weight";
  if (name == "rope_freqs.weight") return name;
  const std::string prefix = "model.layers.";
  const std::size_t dot = name.find('.', prefix.size());
  for (const Renamed& each : kInLayer) {
    if (name.substr(dot + 1) == std::string(each.hugging_face) + ".weight")
      return "blk." + name.substr(prefix.size(), dot - prefix.size()) + "." + each.gguf + ".weight";
  }
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

std::string as_f32(const weights::Tensor& tensor) {
  if (tensor.dtype == DType::f32) return bytes_of(tensor);
  if (tensor.dtype != DType::bf16) throw std::runtime_error("a norm that is neither f32 nor bf16");
  std::string out;
  for (std::size_t i = 0; i < tensor.bytes; i += 2) {
    bf16 value;
    std::memcpy(&value, tensor.data + i, 2);
    out += little_endian(to_float(value));
  }
  return out;
}

void add_rope(const json& config, const std::string& prefix, GgufBytes& file) {
  const json& rope = config.at("rope_parameters");
  const auto number = [&](const char* key, const char* from) {
    file.metadata.push_back(gguf_key(prefix + key, kTypeF32, little_endian(rope.at(from).get<float>())));
  };
  number("rope.freq_base", "rope_theta");
  const std::string type = rope.at("rope_type");
  if (type == "default") return;
  if (type != "linear" && type != "yarn") throw std::runtime_error("no GGUF metadata for RoPE type " + type);
  file.metadata.push_back(gguf_key(prefix + "rope.scaling.type", kTypeText, gguf_string(type)));
  number("rope.scaling.factor", "factor");
  if (type == "yarn") {
    const auto original = rope.at("original_max_position_embeddings").get<std::uint32_t>();
    file.metadata.push_back(
        gguf_key(prefix + "rope.scaling.original_context_length", kTypeU32, u32(original)));
  }
}

}  // namespace

std::string gguf_copy(const Checkpoint& checkpoint) {
  const json& config = checkpoint.config;
  const std::string architecture = config.at("model_type"), prefix = architecture + ".";
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
  count("rope.dimension_count", "head_dim");
  count("vocab_size", "vocab_size");
  file.metadata.push_back(gguf_key(prefix + "attention.layer_norm_rms_epsilon", kTypeF32,
                                   little_endian(config.at("rms_norm_eps").get<float>())));
  add_rope(config, prefix, file);

  for (const auto& [name, tensor] : checkpoint.tensors) {
    const bool vector = tensor.shape.size() == 1;
    std::string data = vector ? as_f32(tensor) : bytes_of(tensor);
    if (architecture == "llama" && name.ends_with("q_proj.weight"))
      data = permuted(tensor, config.at("num_attention_heads"));
    if (architecture == "llama" && name.ends_with("k_proj.weight"))
      data = permuted(tensor, config.at("num_key_value_heads"));
    const std::uint32_t type = vector || tensor.dtype == DType::f32 ? 0 : tensor.dtype == DType::f16 ? 1 : 30;
    const std::vector<std::uint64_t> dimensions(tensor.shape.rbegin(), tensor.shape.rend());
    file.tensors.push_back(gguf_tensor(gguf_name(name), dimensions, type, file.data.size()));
    file.data += data;
    file.data.resize((file.data.size() + file.alignment - 1) / file.alignment * file.alignment, '\0');
  }
  return file.bytes();
}

}  // namespace basin::test
