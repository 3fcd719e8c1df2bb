// What the tensors of a decoder are called in a format. Projections are named without .weight and .bias.
#pragma once

#include <string>

namespace basin::models {

struct TensorNames {
  std::string embedding, output_norm, head;
  std::string rope_divisors;  // empty where the format has none
  std::string layer_prefix;   // before the layer's number
  std::string attention_norm, q, k, v, o, q_norm, k_norm, sink_logit, attention_post_norm;
  std::string mlp_norm, gate, up, down, mlp_post_norm;
  std::string router, expert_gate, expert_up, expert_down;  // stacked [experts, outputs, inputs]
  std::string expert_gate_up;  // gate and up in one, in the layout of Hugging Face's gpt-oss; else empty
};

/// Of Llama; others differ from it in a few.
TensorNames hugging_face_names();
TensorNames gguf_names();

}  // namespace basin::models
