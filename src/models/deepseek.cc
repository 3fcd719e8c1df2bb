// DeepSeek-V3, DeepSeek-V3.2 and GLM-5: multi-head latent attention, and experts in groups beside shared ones. The last two have
// an indexer in front of attention (DeepSeek Sparse Attention).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "basin/base/error.h"
#include "models/architecture.h"

namespace basin::models {
namespace {

using nlohmann::json;

constexpr const char* kOwnKeys[] = {"kv_lora_rank", "n_routed_experts"};
constexpr const char* kSparseTypes[] = {"deepseek_sparse_attention", "indexed_attention"};

void refuse_other(const JsonReader& in, const char* key, const char* supported) {
  if (in.text_or(key, supported) != supported) in.refuse(fmt::format("{} {}", key, in.shown(key)), supported);
}

// A list [layers] of two words; true where it is the second.
std::vector<bool> read_kinds(const JsonReader& in, const char* key, const char* first, const char* second) {
  std::vector<bool> kinds;
  const json& list = in.object()[key];
  if (!list.is_array())
    throw Error(ErrorCode::corrupt, fmt::format("{}: '{}' must be a list", in.where(), key));
  for (const json& kind : list) {
    kinds.push_back(kind == second);
    if (!kinds.back() && kind != first)
      in.refuse(fmt::format("{} {}", key, JsonReader::shown(kind)), fmt::format("{} and {}", first, second));
  }
  return kinds;
}

void read_attention(const JsonReader& in, ModelConfig& c) {
  LatentAttention latent;
  latent.q_rank = in.has("q_lora_rank") ? in.count("q_lora_rank") : 0;
  latent.kv_rank = in.count("kv_lora_rank");
  latent.d_nope = in.count("qk_nope_head_dim");
  latent.d_rope = in.count("qk_rope_head_dim");
  latent.d_v = in.count("v_head_dim");
  c.latent = latent;
  c.d_head = latent.d_qk();
  c.h_kv = c.h_q;
  c.rope.rotary_dim = latent.d_rope;
  c.rope_layout = in.flag_or("rope_interleave", true) ? ops::RopeLayout::interleaved : ops::RopeLayout::half;
  c.attention_scale = 1.0 / std::sqrt(static_cast<double>(latent.d_qk()));
  // YaRN's factor is in the scale here, squared, since the part of a head that is not rotated needs it as well.
  if (c.rope.type == ops::RopeType::yarn && c.rope.mscale_all_dim != 0 && c.rope.factor > 1) {
    const double mscale = 0.1 * c.rope.mscale_all_dim * std::log(c.rope.factor) + 1.0;
    c.attention_scale *= mscale * mscale;
  }
}

void read_experts(const JsonReader& in, ModelConfig& c) {
  refuse_other(in, "scoring_func", "sigmoid");
  refuse_other(in, "topk_method", "noaux_tc");
  if (in.count_or("moe_layer_freq", 1) != 1)
    in.refuse(fmt::format("moe_layer_freq {}", in.shown("moe_layer_freq")), "1");
  c.experts = in.count("n_routed_experts");
  c.chosen_experts = in.count("num_experts_per_tok");
  GroupedExperts grouped;
  grouped.intermediate = in.count("moe_intermediate_size");
  grouped.shared = in.has("n_shared_experts") && in.object()["n_shared_experts"] == 0
                       ? 0
                       : in.count_or("n_shared_experts", 1);
  grouped.choice.chosen = c.chosen_experts;
  grouped.choice.groups = in.count_or("n_group", 1);
  grouped.choice.chosen_groups = in.count_or("topk_group", 1);
  grouped.choice.normalise = in.flag_or("norm_topk_prob", true);
  grouped.choice.scale = in.number_or("routed_scaling_factor", 1.0);
  if (in.has("mlp_layer_types")) {
    grouped.dense = read_kinds(in, "mlp_layer_types", "sparse", "dense");
  } else {
    const bool none = in.has("first_k_dense_replace") && in.object()["first_k_dense_replace"] == 0;
    const auto first = static_cast<std::size_t>(none ? 0 : in.count_or("first_k_dense_replace", 3));
    for (std::size_t i = 0; i < c.layers.size(); ++i) grouped.dense.push_back(i < first);
  }
  c.grouped = grouped;
}

// Layers behind the last one guess further tokens.
void read_extra_layers(const JsonReader& in, ModelConfig& c) {
  const char* key = "num_nextn_predict_layers";
  c.extra_layers = in.has(key) && in.object()[key] == 0 ? 0 : in.count_or(key, 1);
}

void read_v3(const JsonReader& in, ModelConfig& c) {
  in.refuse_unless_null("index_topk");
  read_attention(in, c);
  read_experts(in, c);
  read_extra_layers(in, c);
}

void read_indexer(const JsonReader& in, ops::RopeLayout layout, ModelConfig& c) {
  IndexerConfig indexer;
  indexer.heads = in.count("index_n_heads");
  indexer.d_head = in.count("index_head_dim");
  indexer.topk = in.count("index_topk");
  indexer.rope_layout = layout;
  if (in.has("indexer_rope_interleave"))
    indexer.rope_layout =
        in.flag_or("indexer_rope_interleave", false) ? ops::RopeLayout::interleaved : ops::RopeLayout::half;
  if (c.latent->q_rank == 0) in.refuse("an indexer without q_lora_rank", "indexers of the queries' latent");
  c.indexer = indexer;
}

void read_v32(const JsonReader& in, ModelConfig& c) {
  read_attention(in, c);
  read_experts(in, c);
  read_extra_layers(in, c);
  read_indexer(in, ops::RopeLayout::half, c);
  c.indexer->shared.assign(c.layers.size(), false);
}

// Layers that share: a list, or a pattern of F and S, or every so many layers one that does not, from an offset on.
std::vector<bool> read_shared(const JsonReader& in, std::size_t layers) {
  if (in.has("indexer_types")) return read_kinds(in, "indexer_types", "full", "shared");
  std::vector<bool> shared;
  if (in.has("index_topk_pattern")) {
    for (const char kind : in.text_or("index_topk_pattern", "")) {
      shared.push_back(kind == 'S');
      if (kind != 'S' && kind != 'F')
        in.refuse(fmt::format("index_topk_pattern {}", in.shown("index_topk_pattern")), "F and S");
    }
    return shared;
  }
  const std::int64_t every = in.count_or("index_topk_freq", 1),
                     offset = in.count_or("index_skip_topk_offset", 2);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(layers); ++i)
    shared.push_back(std::max<std::int64_t>(i - offset + 1, 0) % every != 0);
  return shared;
}

void read_glm(const JsonReader& in, ModelConfig& c) {
  read_attention(in, c);
  read_experts(in, c);
  read_extra_layers(in, c);
  read_indexer(in, ops::RopeLayout::interleaved, c);
  c.indexer->shared = read_shared(in, c.layers.size());
}

}  // namespace

const Architecture kDeepseekV3{
    .name = "deepseek_v3",
    .hugging_face_names = hugging_face_names,
    .own_keys = kOwnKeys,
    .read_json = read_v3,
};

const Architecture kDeepseekV32{
    .name = "deepseek_v32",
    .hugging_face_names = hugging_face_names,
    .full_types = kSparseTypes,
    .own_keys = kOwnKeys,
    .read_json = read_v32,
};

const Architecture kGlmMoeDsa{
    .name = "glm_moe_dsa",
    .hugging_face_names = hugging_face_names,
    .full_types = kSparseTypes,
    .own_keys = kOwnKeys,
    .read_json = read_glm,
};

}  // namespace basin::models
