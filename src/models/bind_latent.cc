// Multi-head latent attention and grouped experts, as Hugging Face's DeepSeek and GLM checkpoints name them.
#include <fmt/format.h>

#include <cstring>

#include "basin/base/error.h"
#include "models/bind.h"

namespace basin::models {
namespace {

// What a head of `kv` has: d_nope rows that make its keys, d_v that make its values.
void split_heads(const ModelConfig& c, const std::string& name, const std::string& where,
                 LatentWeights& weights) {
  const LatentAttention& latent = *c.latent;
  const ops::WeightMatrix& kv = weights.kv.weight;
  if (block_elements(kv.dtype) != 1) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: '{}' is stored as {}, whose columns cannot become rows", where, name,
                            basin::name(kv.dtype)),
                "supported are f32, f16, bf16, and F8_E4M3 with block scales");
  }
  const std::int64_t size = block_bytes(kv.dtype), keys = latent.d_nope * latent.kv_rank * size;
  weights.memory.resize(static_cast<std::size_t>(c.h_q * keys));
  for (std::int64_t h = 0; h < c.h_q; ++h) {
    const std::byte* from = kv.data + h * (latent.d_nope + latent.d_v) * kv.row_bytes();
    std::byte* to = weights.memory.data() + h * keys;
    weights.absorbed.push_back({to, kv.dtype, latent.kv_rank, latent.d_nope});
    weights.values.push_back({from + latent.d_nope * kv.row_bytes(), kv.dtype, latent.d_v, latent.kv_rank});
    for (std::int64_t i = 0; i < latent.kv_rank; ++i) {
      for (std::int64_t n = 0; n < latent.d_nope; ++n, to += size)
        std::memcpy(to, from + n * kv.row_bytes() + i * size, static_cast<std::size_t>(size));
    }
  }
}

}  // namespace

LatentWeights bind_latent(const ModelConfig& c, const std::string& prefix, std::int64_t layer,
                          TensorTable& tensors) {
  const LatentAttention& latent = *c.latent;
  const std::string attention = prefix + "self_attn.";
  const auto matrix = [&](const std::string& name, std::int64_t outputs, std::int64_t inputs) {
    return Projection{tensors.matrix(attention + name + ".weight", outputs, inputs), {}};
  };
  LatentWeights weights;
  if (latent.q_rank > 0) {
    weights.q_a = matrix("q_a_proj", latent.q_rank, c.hidden);
    weights.q_norm = tensors.vector(attention + "q_a_layernorm.weight", latent.q_rank);
    weights.q = matrix("q_b_proj", c.h_q * latent.d_qk(), latent.q_rank);
  } else {
    weights.q = matrix("q_proj", c.h_q * latent.d_qk(), c.hidden);
  }
  weights.kv_a = matrix("kv_a_proj_with_mqa", latent.latent(), c.hidden);
  weights.kv_norm = tensors.vector(attention + "kv_a_layernorm.weight", latent.kv_rank);
  weights.kv = matrix("kv_b_proj", c.h_q * (latent.d_nope + latent.d_v), latent.kv_rank);
  split_heads(c, attention + "kv_b_proj.weight", tensors.where(), weights);
  if (c.indexer && !c.indexer->shared[static_cast<std::size_t>(layer)]) {
    const IndexerConfig& indexer = *c.indexer;
    IndexerWeights& to = weights.indexer.emplace();
    to.q = matrix("indexer.wq_b", indexer.heads * indexer.d_head, latent.q_rank);
    to.k = matrix("indexer.wk", indexer.d_head, c.hidden);
    to.k_norm = tensors.vector(attention + "indexer.k_norm.weight", indexer.d_head);
    to.k_norm_bias = tensors.vector(attention + "indexer.k_norm.bias", indexer.d_head);
    to.weights = matrix("indexer.weights_proj", indexer.heads, c.hidden);
  }
  return weights;
}

void bind_grouped(const ModelConfig& c, const std::string& prefix, TensorTable& tensors,
                  FeedForwardWeights& weights) {
  const GroupedExperts& grouped = *c.grouped;
  const auto mlp = [&](const std::string& name, std::int64_t intermediate) {
    const auto matrix = [&](const char* part, std::int64_t outputs, std::int64_t inputs) {
      return Projection{tensors.matrix(prefix + name + part, outputs, inputs), {}};
    };
    return Mlp{matrix(".gate_proj.weight", intermediate, c.hidden),
               matrix(".up_proj.weight", intermediate, c.hidden),
               matrix(".down_proj.weight", c.hidden, intermediate)};
  };
  weights.router.weight = tensors.matrix(prefix + "mlp.gate.weight", c.experts, c.hidden);
  weights.correction = tensors.vector(prefix + "mlp.gate.e_score_correction_bias", c.experts);
  for (std::int64_t e = 0; e < c.experts; ++e)
    weights.experts.push_back(mlp(fmt::format("mlp.experts.{}", e), grouped.intermediate));
  if (grouped.shared > 0) weights.shared = mlp("mlp.shared_experts", grouped.shared * grouped.intermediate);
}

}  // namespace basin::models
