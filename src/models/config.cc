#include "models/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "models/rope_config.h"

namespace basin::models {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxLayers = 4096;

// Keys that change the maths: a configuration that carries one is refused unless its architecture reads it.
constexpr const char* kForeignKeys[] = {"attention_multiplier",   "embedding_multiplier",
                                        "residual_multiplier",    "logits_scaling",
                                        "attn_logit_softcapping", "final_logit_softcapping",
                                        "query_pre_attn_scalar",  "clip_qkv",
                                        "num_local_experts",      "num_experts",
                                        "n_routed_experts",       "quantization_config",
                                        "kv_lora_rank",           "no_rope_layers",
                                        "attention_chunk_size",   "logit_scale"};

const char* json_name(Activation activation) {
  return activation == Activation::gelu_tanh ? "gelu_pytorch_tanh" : "silu";
}

void check_common(const JsonReader& in, const Architecture& architecture) {
  for (const char* key : kForeignKeys) {
    const auto is_key = [&](const char* own) { return std::string_view(own) == key; };
    if (std::ranges::none_of(architecture.own_keys, is_key)) in.refuse_unless_null(key);
  }
  if (!architecture.attention_bias) in.refuse_true("attention_bias");
  in.refuse_true("mlp_bias");
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const char* supported = json_name(architecture.activation);
    if (in.has(key) && in.object()[key] != supported)
      in.refuse(fmt::format("{} {}", key, in.shown(key)), fmt::format("\"{}\"", supported));
  }
  if (in.has("partial_rotary_factor") && in.object()["partial_rotary_factor"] != 1.0)
    in.refuse(fmt::format("partial_rotary_factor {}", in.shown("partial_rotary_factor")), "1");
}

std::int64_t checked_layers(std::int64_t layers, const std::string& where) {
  if (layers > kMaxLayers)
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: {} layers; at most {} are allowed", where, layers, kMaxLayers));
  return layers;
}

// Of each layer, whether it has a window: the last of each `full_every` has none.
std::vector<bool> alternating(std::int64_t layers, std::int64_t full_every) {
  std::vector<bool> local;
  for (std::int64_t i = 0; i < layers; ++i) local.push_back(full_every > 0 && (i + 1) % full_every != 0);
  return local;
}

std::vector<bool> local_layers(const JsonReader& in, const Architecture& architecture, std::int64_t layers) {
  if (!in.has("layer_types")) {
    const std::int64_t every = architecture.full_every;
    if (every == 0) return alternating(layers, 0);
    return alternating(layers,
                       in.count_or("sliding_window_pattern", in.count_or("_sliding_window_pattern", every)));
  }
  const json& types = in.object()["layer_types"];
  if (!types.is_array())
    throw Error(ErrorCode::corrupt, fmt::format("{}: 'layer_types' must be a list", in.where()));
  std::vector<bool> local;
  for (const json& type : types) {
    local.push_back(type == "sliding_attention" && architecture.full_every > 0);
    const auto is_type = [&](const char* full) { return type == full; };
    if (!local.back() && type != "full_attention" && std::ranges::none_of(architecture.full_types, is_type)) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: layer type {} is not supported by this architecture", in.where(),
                              JsonReader::shown(type)));
    }
  }
  if (static_cast<std::int64_t>(local.size()) != layers) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: 'layer_types' lists {} layers, 'num_hidden_layers' is {}", in.where(),
                            local.size(), layers));
  }
  return local;
}

std::vector<bool> local_layers(GgufReader& in, const Architecture& architecture, std::int64_t layers) {
  if (architecture.full_every == 0) return alternating(layers, 0);
  const std::string key = "attention.sliding_window_pattern";
  const auto listed = in.flags(key);
  if (!listed) return alternating(layers, in.count_or(key, architecture.full_every));
  if (static_cast<std::int64_t>(listed->size()) != layers)
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: {} lists {} layers of {}", in.where(), key, listed->size(), layers));
  return *listed;
}

std::vector<LayerAttention> make_layers(const std::vector<bool>& local, std::int64_t window,
                                        const Architecture& architecture) {
  std::vector<LayerAttention> layers;
  for (const bool has_window : local) layers.push_back({has_window ? window : 0, architecture.sink_logits});
  return layers;
}

// What follows from the sizes, where the architecture does not say otherwise.
void set_defaults(const Architecture& architecture, ModelConfig& c) {
  c.architecture = architecture.name;
  c.activation = architecture.activation;
  c.attention_scale = 1.0 / std::sqrt(static_cast<double>(c.d_head));
}

bool is_cap(double value) {
  return value == 0 ||
         (value > 0 && std::isfinite(static_cast<float>(value)) && static_cast<float>(value) > 0);
}

void check_latent(const ModelConfig& c, const auto& corrupt) {
  if (c.latent->d_rope % 2 != 0)
    corrupt(fmt::format("qk_rope_head_dim is {}; it must be even", c.latent->d_rope));
  if (!c.indexer) return;
  if (c.latent->d_rope > c.indexer->d_head) {
    corrupt(fmt::format("an indexer of size {} cannot rotate {} dimensions", c.indexer->d_head,
                        c.latent->d_rope));
  }
  if (c.indexer->shared.size() != c.layers.size() || c.indexer->shared.front())
    corrupt(fmt::format("indexers of {} layers of {}, and the first cannot be shared",
                        c.indexer->shared.size(), c.layers.size()));
}

void check_grouped(const ModelConfig& c, const auto& corrupt) {
  const ops::GroupedChoice& choice = c.grouped->choice;
  const std::int64_t size = c.experts / choice.groups;
  if (size * choice.groups != c.experts || choice.chosen_groups > choice.groups ||
      choice.chosen > choice.chosen_groups * size || (choice.groups > 1 && size < 2)) {
    corrupt(fmt::format("{} experts of {} in {} groups, of which {} count", choice.chosen, c.experts,
                        choice.groups, choice.chosen_groups));
  }
  if (c.grouped->dense.size() != c.layers.size())
    corrupt(
        fmt::format("the feed-forward kinds of {} layers of {}", c.grouped->dense.size(), c.layers.size()));
}

}  // namespace

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
  if (c.chosen_experts > c.experts)
    corrupt(fmt::format("{} of {} experts are chosen for a token", c.chosen_experts, c.experts));
  for (const double cap : {c.attention_softcap, c.logit_softcap}) {
    if (!is_cap(cap)) corrupt(fmt::format("a softcap of {}; it must be positive, or 0 for none", cap));
  }
  if (!(c.activation_limit > 0) || !std::isfinite(static_cast<float>(c.activation_limit)))
    corrupt(fmt::format("swiglu_limit is {}; it must be positive", c.activation_limit));
  if (std::ranges::count(c.layers, std::int64_t{0}, &LayerAttention::window) == 0) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: all of {} layers have a window; one must have full attention", where,
                            c.layers.size()));
  }
  if (c.latent) check_latent(c, corrupt);
  if (c.grouped) check_grouped(c, corrupt);
  try {
    static_cast<void>(ops::Rope(c.rope, c.rope_layout));
    if (c.local_rope) static_cast<void>(ops::Rope(*c.local_rope, c.rope_layout));
  } catch (const Error& error) {
    corrupt(error.what());
  }
}

ModelConfig read_hf_config(const json& config, const Architecture& architecture, const std::string& where) {
  const JsonReader in(config, where);
  check_common(in, architecture);
  ModelConfig c;
  c.vocabulary = in.count("vocab_size");
  c.hidden = in.count("hidden_size");
  c.intermediate = in.count("intermediate_size");
  c.h_q = in.count("num_attention_heads");
  c.h_kv = in.count_or("num_key_value_heads", c.h_q);
  if (!in.has("head_dim") && c.hidden % c.h_q != 0) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: hidden_size {} is not a multiple of {} heads", where, c.hidden, c.h_q));
  }
  c.d_head = in.count_or("head_dim", std::max<std::int64_t>(1, c.hidden / c.h_q));
  c.context = in.count("max_position_embeddings");
  c.rms_norm_eps = in.number("rms_norm_eps");
  c.tied_embeddings = in.flag_or("tie_word_embeddings", architecture.tied_by_default);
  const auto local = local_layers(in, architecture, checked_layers(in.count("num_hidden_layers"), where));
  const bool windows = std::ranges::find(local, true) != local.end();
  c.layers = make_layers(local, windows ? in.count("sliding_window") : 0, architecture);
  c.rope = read_rope(in, architecture.local_rope ? "full_attention" : nullptr, architecture.rope_theta,
                     c.d_head, c.context);
  c.rope_layout = ops::RopeLayout::half;
  set_defaults(architecture, c);
  architecture.read_json(in, c);
  check_sizes(c, where);
  return c;
}

ModelConfig read_gguf_config(const weights::GgufFile& file, const Architecture& architecture,
                             const std::string& where) {
  GgufReader in(file, std::string(architecture.gguf_name) + ".", where);
  ModelConfig c;
  c.hidden = in.count("embedding_length");
  c.intermediate = in.count("feed_forward_length");
  c.h_q = in.count("attention.head_count");
  c.h_kv = in.count_or("attention.head_count_kv", c.h_q);
  c.d_head = in.count_or("attention.key_length", std::max<std::int64_t>(1, c.hidden / c.h_q));
  if (in.count_or("attention.value_length", c.d_head) != c.d_head) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: attention.value_length differs from the key length {}", where, c.d_head));
  }
  c.context = in.count("context_length");
  c.rms_norm_eps = in.number_or("attention.layer_norm_rms_epsilon", 1e-5);
  const auto local = local_layers(in, architecture, checked_layers(in.count("block_count"), where));
  c.layers = make_layers(local, architecture.full_every > 0 ? in.count("attention.sliding_window") : 0,
                         architecture);
  c.rope = read_rope(in, architecture.rope_theta, c.d_head);
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
  set_defaults(architecture, c);
  architecture.read_gguf(in, c);
  in.refuse_unused();
  check_sizes(c, where);
  return c;
}

}  // namespace basin::models
