// The decoder-only transformer that Llama and Qwen3 share, over a checkpoint's mapped tensors.
#pragma once

#include <memory>

#include "models/architecture.h"
#include "models/model.h"
#include "models/tensor_table.h"

namespace basin::models {

/// What the tensors of one layer are called in a format.
struct TensorNames {
  std::string embedding, output_norm, head;
  std::string layer_prefix;  // before the layer's number
  std::string attention_norm, q, k, v, o, q_norm, k_norm;
  std::string mlp_norm, gate, up, down;
};
const TensorNames& hugging_face_names();
const TensorNames& gguf_names();

/// `owner` keeps the mapping that `tensors` points into. Every tensor is consumed or refused by name.
std::unique_ptr<Model> make_decoder(const Architecture& architecture, ModelConfig config, TensorTable tensors,
                                    const TensorNames& names, std::shared_ptr<const void> owner);

}  // namespace basin::models
