#include "models/bind.h"

#include <fmt/format.h>

namespace basin::models {
namespace {

Projection projection(TensorTable& tensors, const std::string& name, std::int64_t outputs,
                      std::int64_t inputs, bool has_bias) {
  Projection projection;
  projection.weight = tensors.matrix(name + ".weight", outputs, inputs);
  if (has_bias) projection.bias = tensors.vector(name + ".bias", outputs);
  return projection;
}

// Binds the tensors of one layer.
struct Binder {
  const Architecture& architecture;
  const ModelConfig& c;
  const TensorNames& names;
  float norm_offset;
  TensorTable& tensors;
  std::string prefix;
  std::int64_t layer;

  std::vector<float> norm(const std::string& name, std::int64_t size) const {
    return bind_norm(tensors, prefix + name, size, norm_offset);
  }

  AttentionWeights attention() const {
    const bool bias = architecture.attention_bias;
    const std::int64_t q_width = c.h_q * c.d_head, kv_width = c.h_kv * c.d_head;
    AttentionWeights weights;
    weights.norm = norm(names.attention_norm, c.hidden);
    if (c.latent) {
      weights.latent = bind_latent(c, prefix, layer, tensors);
      weights.o = projection(tensors, prefix + names.o, c.hidden, c.h_q * c.latent->d_v, bias);
      return weights;
    }
    weights.q = projection(tensors, prefix + names.q, q_width, c.hidden, bias);
    weights.k = projection(tensors, prefix + names.k, kv_width, c.hidden, bias);
    weights.v = projection(tensors, prefix + names.v, kv_width, c.hidden, bias);
    weights.o = projection(tensors, prefix + names.o, c.hidden, q_width, bias);
    if (architecture.qk_norm) {
      weights.q_norm = norm(names.q_norm, c.d_head);
      weights.k_norm = norm(names.k_norm, c.d_head);
    }
    if (architecture.sink_logits) weights.sink_logit = tensors.vector(prefix + names.sink_logit, c.h_q);
    if (architecture.post_norms) weights.post_norm = norm(names.attention_post_norm, c.hidden);
    return weights;
  }

  FeedForwardWeights feed_forward() const {
    FeedForwardWeights weights;
    weights.norm = norm(names.mlp_norm, c.hidden);
    if (c.grouped && !c.grouped->dense[static_cast<std::size_t>(layer)]) {
      bind_grouped(c, prefix, tensors, weights);
    } else if (c.experts > 0 && !c.grouped) {
      weights.router = projection(tensors, prefix + names.router, c.experts, c.hidden, true);
      bind_experts(c, names, prefix, tensors, weights);
    } else {
      Mlp mlp;
      mlp.gate = projection(tensors, prefix + names.gate, c.intermediate, c.hidden, false);
      mlp.up = projection(tensors, prefix + names.up, c.intermediate, c.hidden, false);
      mlp.down = projection(tensors, prefix + names.down, c.hidden, c.intermediate, false);
      weights.experts.push_back(std::move(mlp));
    }
    if (architecture.post_norms) weights.post_norm = norm(names.mlp_post_norm, c.hidden);
    return weights;
  }
};

}  // namespace

std::vector<float> bind_norm(TensorTable& tensors, const std::string& name, std::int64_t size, float offset) {
  std::vector<float> norm = tensors.vector(name, size);
  for (float& weight : norm) weight += offset;
  return norm;
}

std::vector<Layer> bind_layers(const Architecture& architecture, const ModelConfig& config,
                               const TensorNames& names, float norm_offset, TensorTable& tensors) {
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const Binder binder{architecture,
                        config,
                        names,
                        norm_offset,
                        tensors,
                        fmt::format("{}{}.", names.layer_prefix, i),
                        static_cast<std::int64_t>(i)};
    layers.push_back({binder.attention(), binder.feed_forward()});
  }
  return layers;
}

}  // namespace basin::models
