// Gemma 3 (text): five layers with a window for each with full attention, and a RoPE of their own; norms before and after
// both halves of a layer; scaled embeddings.
#include <cmath>

#include "models/architecture.h"
#include "models/rope_config.h"

namespace basin::models {
namespace {

constexpr const char* kOwnKeys[] = {"query_pre_attn_scalar", "attn_logit_softcapping",
                                    "final_logit_softcapping"};
constexpr double kLocalTheta = 10000.0;

TensorNames gemma3_hugging_face() {
  TensorNames names = hugging_face_names();
  names.attention_post_norm = "post_attention_layernorm.weight";
  names.mlp_norm = "pre_feedforward_layernorm.weight";
  names.mlp_post_norm = "post_feedforward_layernorm.weight";
  return names;
}

TensorNames gemma3_gguf() {
  TensorNames names = gguf_names();
  names.attention_post_norm = "post_attention_norm.weight";
  names.mlp_post_norm = "post_ffw_norm.weight";
  return names;
}

void scale_embeddings(ModelConfig& c) {
  c.embedding_scale = std::sqrt(static_cast<double>(c.hidden));
}

ops::RopeConfig plain_rope(std::int64_t d_head, double theta) {
  ops::RopeConfig rope;
  rope.rotary_dim = d_head;
  rope.theta = theta;
  return rope;
}

// Each kind of layer has its section of rope_parameters; older files have rope_local_base_freq beside the usual keys.
void read_json(const JsonReader& in, ModelConfig& c) {
  in.refuse_true("use_bidirectional_attention");
  scale_embeddings(c);
  c.attention_scale = 1.0 / std::sqrt(in.positive_or("query_pre_attn_scalar", 256.0));
  c.attention_softcap = in.has("attn_logit_softcapping") ? in.positive_or("attn_logit_softcapping", 0) : 0;
  c.logit_softcap = in.has("final_logit_softcapping") ? in.positive_or("final_logit_softcapping", 0) : 0;
  c.local_rope = in.has("rope_parameters") && in.section("rope_parameters").has("sliding_attention")
                     ? read_rope(in, "sliding_attention", kLocalTheta, c.d_head, c.context)
                     : plain_rope(c.d_head, in.number_or("rope_local_base_freq", kLocalTheta));
}

void read_gguf(GgufReader& in, ModelConfig& c) {
  scale_embeddings(c);
  c.attention_scale = gemma3_gguf_scale(c);
  c.attention_softcap = in.number_or("attn_logit_softcapping", 0);
  c.logit_softcap = in.number_or("final_logit_softcapping", 0);
  c.local_rope = plain_rope(c.d_head, in.number_or("rope.freq_base_swa", kLocalTheta));
}

}  // namespace

double gemma3_gguf_scale(const ModelConfig& config) {
  constexpr std::size_t kLargest = 62;
  const double width =
      static_cast<double>(config.layers.size() == kLargest ? config.hidden / config.h_q : config.d_head);
  return 1.0 / std::sqrt(width);
}

const Architecture kGemma3{
    .name = "gemma3_text",
    .gguf_name = "gemma3",
    .hugging_face_names = gemma3_hugging_face,
    .gguf_names = gemma3_gguf,
    .qk_norm = true,
    .post_norms = true,
    .local_rope = true,
    .tied_by_default = true,
    .norm_offset = 1.0f,
    .activation = Activation::gelu_tanh,
    .rope_theta = 1000000.0,
    .full_every = 6,
    .own_keys = kOwnKeys,
    .read_json = read_json,
    .read_gguf = read_gguf,
};

}  // namespace basin::models
