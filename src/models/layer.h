// The weights of one layer of a decoder, as the pass wants them. What an architecture lacks is empty.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "ops/linear.h"

namespace basin::models {

struct Projection {
  ops::WeightMatrix weight;
  std::vector<float> bias;  // [outputs], or empty

  ops::LinearOutput into(float* y /*[tokens, outputs], dense*/) const {
    return {&weight, bias.empty() ? nullptr : bias.data(), y, weight.outputs};
  }
};

/// Scores keys for a selection.
struct IndexerWeights {
  Projection q, k, weights;                // of the queries' latent, and of the layer's input
  std::vector<float> k_norm, k_norm_bias;  // [d_head]
};

/// Instead of q, k and v.
struct LatentWeights {
  Projection q_a, q;           // q_a: no outputs where queries have no latent
  std::vector<float> q_norm;   // [q_rank]
  Projection kv_a, kv;         // kv [h_q (d_nope + d_v), kv_rank]: keys and values of each head in turn
  std::vector<float> kv_norm;  // [kv_rank]
  std::vector<ops::WeightMatrix> absorbed;  // [h_q] the keys' part of `kv`, transposed: [kv_rank, d_nope]
  std::vector<ops::WeightMatrix> values;    // [h_q] the values' part: [d_v, kv_rank]
  std::vector<std::byte> memory;            // of `absorbed`
  std::optional<IndexerWeights> indexer;    // where the layer has one of its own
};

struct AttentionWeights {
  std::vector<float> norm;            // [hidden]
  std::vector<float> q_norm, k_norm;  // [d_head], over each head before rotation; or empty
  Projection q, k, v, o;
  std::vector<float> sink_logit;  // [h_q], or empty
  std::vector<float> post_norm;   // [hidden], over what is added to the residual stream; or empty
  std::optional<LatentWeights> latent;
  ops::NextMatrices next;  // what is multiplied after o; or empty
};

struct Mlp {
  Projection gate, up, down;
};

struct FeedForwardWeights {
  std::vector<float> norm;        // [hidden]
  Projection router;              // no outputs in a dense layer
  std::vector<float> correction;  // [experts] of grouped experts; or empty
  std::optional<Mlp> shared;      // of grouped experts
  std::vector<Mlp> experts;       // one in a dense layer
  std::vector<float> post_norm;   // as above
  std::vector<std::byte> memory;  // of matrices that are not as their file stores them
  ops::NextMatrices next;         // what is multiplied after this; or empty
};

struct Layer {
  AttentionWeights attention;
  FeedForwardWeights feed_forward;
};

}  // namespace basin::models
