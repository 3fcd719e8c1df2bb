// The weights of one layer of a decoder, as the pass wants them. What an architecture lacks is empty.
#pragma once

#include <cstddef>
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

struct AttentionWeights {
  std::vector<float> norm;            // [hidden]
  std::vector<float> q_norm, k_norm;  // [d_head], over each head before rotation; or empty
  Projection q, k, v, o;
  std::vector<float> sink_logit;  // [h_q], or empty
  std::vector<float> post_norm;   // [hidden], over what is added to the residual stream; or empty
};

struct Mlp {
  Projection gate, up, down;
};

struct FeedForwardWeights {
  std::vector<float> norm;        // [hidden]
  Projection router;              // no outputs in a dense layer
  std::vector<Mlp> experts;       // one in a dense layer
  std::vector<float> post_norm;   // as above
  std::vector<std::byte> memory;  // of matrices that are not as their file stores them
};

struct Layer {
  AttentionWeights attention;
  FeedForwardWeights feed_forward;
};

}  // namespace basin::models
