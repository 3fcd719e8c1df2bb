#include "models/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "basin/base/error.h"

namespace basin::models {
namespace {

using nlohmann::json;

// Largest value any count of a config may have: it keeps products of two of them inside int64.
constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;
constexpr std::int64_t kMaxLayers = 4096;

Error unsupported(const std::string& what) {
  return Error(ErrorCode::unsupported, what);
}

std::string shown(const json& value) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= 120 ? text : text.substr(0, 120) + "...";
}

bool present(const json& config, const char* key) {
  return config.contains(key) && !config[key].is_null();
}

class JsonReader {
 public:
  JsonReader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  std::int64_t count(const char* key) const {
    if (!present(object_, key)) throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}'", where_, key));
    const json& value = object_[key];
    // A number that is written 64.0 is not a count.
    if (!value.is_number_integer() || value.get<double>() < 1 ||
        value.get<double>() > static_cast<double>(kMaxCount)) {
      throw Error(ErrorCode::corrupt, fmt::format("{}: '{}' is {}; allowed is an integer from 1 to {}",
                                                  where_, key, shown(value), kMaxCount));
    }
    return value.get<std::int64_t>();
  }

  std::int64_t count_or(const char* key, std::int64_t otherwise) const {
    return present(object_, key) ? count(key) : otherwise;
  }

  double number(const char* key) const {
    if (!present(object_, key)) throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}'", where_, key));
    const json& value = object_[key];
    if (!value.is_number())
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: '{}' is {}; it must be a number", where_, key, shown(value)));
    return value.get<double>();
  }

  double number_or(const char* key, double otherwise) const {
    return present(object_, key) ? number(key) : otherwise;
  }

  bool flag_or(const char* key, bool otherwise) const {
    if (!present(object_, key)) return otherwise;
    const json& value = object_[key];
    if (!value.is_boolean())
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: '{}' is {}; it must be true or false", where_, key, shown(value)));
    return value.get<bool>();
  }

  const json& object() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  const json& object_;
  std::string where_;
};

// Keys of other architectures that change the maths; a Llama-like config that carries one is not what it seems.
constexpr const char* kForeignKeys[] = {"attention_multiplier",   "embedding_multiplier",
                                        "residual_multiplier",    "logits_scaling",
                                        "attn_logit_softcapping", "final_logit_softcapping",
                                        "query_pre_attn_scalar",  "clip_qkv",
                                        "num_local_experts",      "num_experts",
                                        "n_routed_experts",       "quantization_config",
                                        "kv_lora_rank",           "no_rope_layers",
                                        "attention_chunk_size",   "logit_scale"};

void check_common(const json& config) {
  for (const char* key : kForeignKeys) refuse_unless_null(config, key);
  refuse_true(config, "attention_bias");
  refuse_true(config, "mlp_bias");
  if (present(config, "hidden_act") && config["hidden_act"] != "silu") {
    throw unsupported(
        fmt::format("hidden_act {} is not supported; only \"silu\" is", shown(config["hidden_act"])));
  }
  if (present(config, "partial_rotary_factor") && config["partial_rotary_factor"] != 1.0) {
    throw unsupported(fmt::format("partial_rotary_factor {} is not supported; only 1 is",
                                  shown(config["partial_rotary_factor"])));
  }
  if (present(config, "layer_types")) {
    if (!config["layer_types"].is_array()) throw Error(ErrorCode::corrupt, "'layer_types' must be a list");
    for (const json& type : config["layer_types"]) {
      if (type != "full_attention")
        throw unsupported(fmt::format("layer type {} is not supported by this architecture", shown(type)));
    }
    const json layers = present(config, "num_hidden_layers") ? config["num_hidden_layers"] : json();
    if (layers != config["layer_types"].size()) {
      throw Error(ErrorCode::corrupt, fmt::format("'layer_types' lists {} layers, 'num_hidden_layers' is {}",
                                                  config["layer_types"].size(), shown(layers)));
    }
  }
}

// Both spellings: rope_scaling (rope_type or type) beside rope_theta, and rope_parameters that holds everything.
ops::RopeConfig read_rope(const JsonReader& top, std::int64_t d_head, std::int64_t context) {
  ops::RopeConfig rope;
  rope.rotary_dim = d_head;
  const json& config = top.object();
  const bool newer = present(config, "rope_parameters"), older = present(config, "rope_scaling");
  if (newer && older && config["rope_parameters"] != config["rope_scaling"]) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{} has rope_parameters and rope_scaling, and they differ", top.where()));
  }
  rope.theta = top.number_or("rope_theta", 10000.0);
  if (!newer && !older) return rope;

  const json& section = config[newer ? "rope_parameters" : "rope_scaling"];
  const std::string name = newer ? "rope_parameters" : "rope_scaling";
  if (!section.is_object())
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}' must be an object", top.where(), name));
  const JsonReader in(section, top.where() + ": " + name);
  const double theta = in.number_or("rope_theta", rope.theta);
  if (present(config, "rope_theta") && theta != rope.theta) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: rope_theta is {} and, inside {}, {}", top.where(), rope.theta, name, theta));
  }
  rope.theta = theta;
  const json type = present(section, "rope_type") ? section["rope_type"]
                    : present(section, "type")    ? section["type"]
                                                  : json("default");

  if (present(section, "type") && type != section["type"]) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: 'rope_type' is {} and 'type' is {}", in.where(),
                                                shown(type), shown(section["type"])));
  }
  std::set<std::string> known = {"rope_type", "type", "rope_theta"};
  if (type == "default") {
    rope.type = ops::RopeType::standard;
  } else if (type == "linear") {
    rope.type = ops::RopeType::linear;
    known.insert("factor");
  } else if (type == "llama3") {
    rope.type = ops::RopeType::llama3;
    known.insert({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
    rope.low_freq_factor = in.number("low_freq_factor");
    rope.high_freq_factor = in.number("high_freq_factor");
    rope.original_context = in.count("original_max_position_embeddings");
  } else if (type == "yarn") {
    rope.type = ops::RopeType::yarn;
    known.insert({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
                  "attention_factor", "mscale", "mscale_all_dim"});
    rope.original_context = in.count_or("original_max_position_embeddings", context);
    rope.beta_fast = in.number_or("beta_fast", 32.0);
    rope.beta_slow = in.number_or("beta_slow", 1.0);
    rope.truncate = in.flag_or("truncate", true);
    rope.attention_factor = in.number_or("attention_factor", 0.0);
    if (rope.attention_factor == 0 && present(section, "attention_factor"))
      throw Error(ErrorCode::corrupt, fmt::format("{}: 'attention_factor' is 0", in.where()));
    rope.mscale = in.number_or("mscale", 0.0);
    rope.mscale_all_dim = in.number_or("mscale_all_dim", 0.0);
  } else {
    throw unsupported(
        fmt::format("{}: rope type {} is not supported; supported are default, linear, llama3 and yarn",
                    top.where(), shown(type)));
  }
  if (rope.type != ops::RopeType::standard) rope.factor = in.number("factor");
  for (const auto& [key, value] : section.items()) {
    if (!known.contains(key) && !value.is_null()) {
      throw unsupported(fmt::format("{}: '{}' = {} has no meaning here that is supported (rope type {})",
                                    in.where(), key, shown(value), shown(type)));
    }
  }
  return rope;
}

void check_sizes(const ModelConfig& c, const std::string& where) {
  const auto corrupt = [&](const std::string& what) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: {}", where, what));
  };
  if (c.h_q % c.h_kv != 0)
    corrupt(fmt::format("{} query heads are not a multiple of {} key heads", c.h_q, c.h_kv));
  if (c.d_head % 2 != 0)
    corrupt(fmt::format("a head size of {} cannot be rotated; it must be even", c.d_head));
  if (!(c.rms_norm_eps >= 0) || c.rms_norm_eps > 1)
    corrupt(fmt::format("an RMS norm epsilon of {}", c.rms_norm_eps));
  if (static_cast<std::int64_t>(c.layers.size()) > kMaxLayers)
    corrupt(fmt::format("{} layers; at most {} are allowed", c.layers.size(), kMaxLayers));
  try {
    static_cast<void>(ops::Rope(c.rope, c.rope_layout));
  } catch (const Error& error) {
    corrupt(error.what());
  }
}

// Typed access to GGUF metadata below "ARCH.".
class GgufReader {
 public:
  GgufReader(const weights::GgufFile& file, std::string prefix, std::string where)
      : file_(file), prefix_(std::move(prefix)), where_(std::move(where)) {}

  const weights::GgufValue* find(const std::string& key) {
    used_.insert(prefix_ + key);
    const auto it = file_.metadata.find(prefix_ + key);
    return it == file_.metadata.end() ? nullptr : &it->second;
  }

  std::int64_t count(const std::string& key) {
    const auto* value = find(key);
    if (value == nullptr)
      throw Error(ErrorCode::corrupt, fmt::format("{} has no '{}{}'", where_, prefix_, key));
    std::int64_t result = 0;
    if (const auto* i = std::get_if<std::int64_t>(value))
      result = *i;
    else if (const auto* u = std::get_if<std::uint64_t>(value))
      result = static_cast<std::int64_t>(std::min<std::uint64_t>(*u, std::uint64_t{1} << 62));
    else if (std::holds_alternative<std::vector<std::int64_t>>(*value))
      throw unsupported(fmt::format("{}: '{}{}' differs from layer to layer, which is not supported", where_,
                                    prefix_, key));
    if (result < 1 || result > kMaxCount) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: '{}{}' must be an integer from 1 to {}", where_, prefix_, key, kMaxCount));
    }
    return result;
  }

  std::int64_t count_or(const std::string& key, std::int64_t otherwise) {
    return find(key) != nullptr ? count(key) : otherwise;
  }

  double number_or(const std::string& key, double otherwise) {
    const auto* value = find(key);
    if (value == nullptr) return otherwise;
    if (const auto* d = std::get_if<double>(value)) return *d;
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}{}' must be a float", where_, prefix_, key));
  }

  std::string text_or(const std::string& key, const std::string& otherwise) {
    const auto* value = find(key);
    if (value == nullptr) return otherwise;
    if (const auto* s = std::get_if<std::string>(value)) return *s;
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}{}' must be a string", where_, prefix_, key));
  }

  /// Every key of the architecture that nobody asked for might change the maths.
  void refuse_unused() const {
    for (const auto& [key, value] : file_.metadata) {
      if (key.starts_with(prefix_) && !used_.contains(key)) {
        throw unsupported(fmt::format("{}: the key '{}' is not supported", where_, key));
      }
    }
  }

 private:
  const weights::GgufFile& file_;
  std::string prefix_, where_;
  std::set<std::string> used_;
};

void read_gguf_rope(GgufReader& in, ModelConfig& c, const std::string& where) {
  c.rope.rotary_dim = in.count_or("rope.dimension_count", c.d_head);
  if (c.rope.rotary_dim != c.d_head) {
    throw unsupported(fmt::format("{}: rope.dimension_count {} differs from the head size {}", where,
                                  c.rope.rotary_dim, c.d_head));
  }
  c.rope.theta = in.number_or("rope.freq_base", 10000.0);
  const std::string type = in.text_or("rope.scaling.type", "none");
  if (type == "none") return;
  c.rope.factor = in.number_or("rope.scaling.factor", 1.0);
  if (type == "linear") {
    c.rope.type = ops::RopeType::linear;
  } else if (type == "yarn") {
    c.rope.type = ops::RopeType::yarn;
    c.rope.original_context = in.count("rope.scaling.original_context_length");
    const double factor = in.number_or("rope.scaling.attn_factor", 1.0);
    if (factor != 1.0)
      throw unsupported(fmt::format("{}: rope.scaling.attn_factor {} is not supported", where, factor));
  } else {
    throw unsupported(fmt::format(
        "{}: rope.scaling.type '{}' is not supported; supported are none, linear and yarn", where, type));
  }
  const auto* finetuned = in.find("rope.scaling.finetuned");  // a remark, not maths
  if (finetuned != nullptr && !std::holds_alternative<bool>(*finetuned)) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: rope.scaling.finetuned must be a boolean", where));
  }
}

}  // namespace

void refuse_unless_null(const json& config, const char* key) {
  if (present(config, key))
    throw unsupported(fmt::format("'{}' = {} is not supported", key, shown(config[key])));
}

void refuse_true(const json& config, const char* key) {
  if (present(config, key) && config[key] != false) {
    throw unsupported(fmt::format("'{}' = {} is not supported", key, shown(config[key])));
  }
}

ModelConfig read_hf_config(const json& config, const Architecture& architecture, const std::string& where) {
  try {
    check_common(config);
    architecture.check_config(config);
  } catch (const Error& error) {
    throw error.in(where);
  }
  const JsonReader in(config, where);
  ModelConfig c;
  c.architecture = architecture.name;
  c.vocabulary = in.count("vocab_size");
  c.hidden = in.count("hidden_size");
  c.intermediate = in.count("intermediate_size");
  c.h_q = in.count("num_attention_heads");
  c.h_kv = in.count_or("num_key_value_heads", c.h_q);
  if (!present(config, "head_dim") && c.hidden % c.h_q != 0) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: hidden_size {} is not a multiple of {} heads", where, c.hidden, c.h_q));
  }
  c.d_head = in.count_or("head_dim", std::max<std::int64_t>(1, c.hidden / c.h_q));
  c.context = in.count("max_position_embeddings");
  c.rms_norm_eps = in.number("rms_norm_eps");
  c.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  const std::int64_t layers = in.count("num_hidden_layers");
  if (layers > kMaxLayers)
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: {} layers; at most {} are allowed", where, layers, kMaxLayers));
  c.layers.assign(static_cast<std::size_t>(layers), LayerAttention{});
  c.rope = read_rope(in, c.d_head, c.context);
  c.rope_layout = ops::RopeLayout::half;
  check_sizes(c, where);
  return c;
}

ModelConfig read_gguf_config(const weights::GgufFile& file, const Architecture& architecture,
                             const std::string& where) {
  GgufReader in(file, std::string(architecture.name) + ".", where);
  ModelConfig c;
  c.architecture = architecture.name;
  c.hidden = in.count("embedding_length");
  c.intermediate = in.count("feed_forward_length");
  c.h_q = in.count("attention.head_count");
  c.h_kv = in.count_or("attention.head_count_kv", c.h_q);
  c.d_head = in.count_or("attention.key_length", std::max<std::int64_t>(1, c.hidden / c.h_q));
  if (in.count_or("attention.value_length", c.d_head) != c.d_head) {
    throw unsupported(
        fmt::format("{}: attention.value_length differs from the key length {}", where, c.d_head));
  }
  c.context = in.count("context_length");
  c.rms_norm_eps = in.number_or("attention.layer_norm_rms_epsilon", 1e-5);
  const std::int64_t layers = in.count("block_count");
  if (layers > kMaxLayers)
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: {} layers; at most {} are allowed", where, layers, kMaxLayers));
  c.layers.assign(static_cast<std::size_t>(layers), LayerAttention{});
  read_gguf_rope(in, c, where);
  c.rope_layout = architecture.gguf_rope_layout;
  // The vocabulary is the embedding's; the key, where present, must agree.
  const auto embedding = file.tensors.find("token_embd.weight");
  if (embedding == file.tensors.end() || embedding->second.shape.size() != 2) {
    throw Error(ErrorCode::corrupt, fmt::format("{} has no matrix 'token_embd.weight'", where));
  }
  c.vocabulary = embedding->second.shape[0];
  if (in.count_or("vocab_size", c.vocabulary) != c.vocabulary) {
    throw Error(
        ErrorCode::corrupt,
        fmt::format("{}: vocab_size differs from the {} rows of token_embd.weight", where, c.vocabulary));
  }
  c.tied_embeddings = !file.tensors.contains("output.weight");
  in.refuse_unused();
  check_sizes(c, where);
  return c;
}

}  // namespace basin::models
