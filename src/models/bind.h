// From a checkpoint's tensors to the layers of a decoder. Every tensor is consumed or refused by name.
#pragma once

#include <string>
#include <vector>

#include "models/architecture.h"
#include "models/layer.h"
#include "models/tensor_table.h"

namespace basin::models {

/// `norm_offset` is added to every norm weight: what the format leaves out.
std::vector<Layer> bind_layers(const Architecture& architecture, const ModelConfig& config,
                               const TensorNames& names, float norm_offset, TensorTable& tensors);

std::vector<float> bind_norm(TensorTable& tensors, const std::string& name, std::int64_t size, float offset);

/// What stands in for q, k and v in latent attention, and grouped experts with their router, of the layer whose tensors begin with
/// `prefix`.
LatentWeights bind_latent(const ModelConfig& config, const std::string& prefix, std::int64_t layer,
                          TensorTable& tensors);
void bind_grouped(const ModelConfig& config, const std::string& prefix, TensorTable& tensors,
                  FeedForwardWeights& weights);

/// The experts of the layer whose tensors begin with `prefix`, for `weights`.
void bind_experts(const ModelConfig& config, const TensorNames& names, const std::string& prefix,
                  TensorTable& tensors, FeedForwardWeights& weights);

}  // namespace basin::models
