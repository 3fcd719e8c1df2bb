#include "models/tensor_names.h"

namespace basin::models {

TensorNames hugging_face_names() {
  TensorNames names;
  names.embedding = "model.embed_tokens.weight";
  names.output_norm = "model.norm.weight";
  names.head = "lm_head.weight";
  names.layer_prefix = "model.layers.";
  names.attention_norm = "input_layernorm.weight";
  names.q = "self_attn.q_proj";
  names.k = "self_attn.k_proj";
  names.v = "self_attn.v_proj";
  names.o = "self_attn.o_proj";
  names.q_norm = "self_attn.q_norm.weight";
  names.k_norm = "self_attn.k_norm.weight";
  names.mlp_norm = "post_attention_layernorm.weight";
  names.gate = "mlp.gate_proj";
  names.up = "mlp.up_proj";
  names.down = "mlp.down_proj";
  return names;
}

TensorNames gguf_names() {
  TensorNames names;
  names.embedding = "token_embd.weight";
  names.output_norm = "output_norm.weight";
  names.head = "output.weight";
  names.rope_divisors = "rope_freqs.weight";
  names.layer_prefix = "blk.";
  names.attention_norm = "attn_norm.weight";
  names.q = "attn_q";
  names.k = "attn_k";
  names.v = "attn_v";
  names.o = "attn_output";
  names.q_norm = "attn_q_norm.weight";
  names.k_norm = "attn_k_norm.weight";
  names.mlp_norm = "ffn_norm.weight";
  names.gate = "ffn_gate";
  names.up = "ffn_up";
  names.down = "ffn_down";
  return names;
}

}  // namespace basin::models
