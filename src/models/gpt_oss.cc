// gpt-oss: a learned sink logit for each head, a window on every other layer, and a mixture of experts with biases
// throughout. A router takes the experts with the largest logits; their softmax weighs what they say.
#include <fmt/format.h>

#include "models/architecture.h"

namespace basin::models {
namespace {

constexpr const char* kOwnKeys[] = {"num_local_experts", "quantization_config"};

TensorNames gpt_oss_hugging_face() {
  TensorNames names = hugging_face_names();
  names.sink_logit = "self_attn.sinks";
  names.router = "mlp.router";
  names.expert_gate_up = "mlp.experts.gate_up_proj";
  names.expert_down = "mlp.experts.down_proj";
  return names;
}

TensorNames gpt_oss_gguf() {
  TensorNames names = gguf_names();
  names.sink_logit = "attn_sinks.weight";
  names.mlp_norm = "post_attention_norm.weight";
  names.router = "ffn_gate_inp";
  names.expert_gate = "ffn_gate_exps";
  names.expert_up = "ffn_up_exps";
  names.expert_down = "ffn_down_exps";
  return names;
}

void read_json(const JsonReader& in, ModelConfig& c) {
  in.refuse_false("attention_bias");
  c.experts = in.count("num_local_experts");
  c.chosen_experts = in.count("num_experts_per_tok");
  c.activation_limit = in.number_or("swiglu_limit", c.activation_limit);
  if (!in.has("quantization_config")) return;
  const JsonReader quantised = in.section("quantization_config");
  const std::string method = quantised.text_or("quant_method", "");
  if (method != "mxfp4") in.refuse(fmt::format("quantization_config: quant_method \"{}\"", method), "mxfp4");
}

void read_gguf(GgufReader& in, ModelConfig& c) {
  c.experts = in.count("expert_count");
  c.chosen_experts = in.count("expert_used_count");
  c.intermediate = in.count_or("expert_feed_forward_length", c.intermediate);
  c.rope.truncate = false;  // the format has no key for it, and the architecture no other way
}

}  // namespace

const Architecture kGptOss{
    .name = "gpt_oss",
    .gguf_name = "gpt-oss",
    .hugging_face_names = gpt_oss_hugging_face,
    .gguf_names = gpt_oss_gguf,
    .attention_bias = true,
    .sink_logits = true,
    .activation = Activation::swiglu_clamped,
    .rope_theta = 150000.0,
    .full_every = 2,
    .own_keys = kOwnKeys,
    .read_json = read_json,
    .read_gguf = read_gguf,
};

}  // namespace basin::models
