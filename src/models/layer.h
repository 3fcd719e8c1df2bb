// The weights of one layer of a decoder, as the pass wants them. What an architecture lacks is empty.
#pragma once

#include <vector>

#include "ops/linear.h"

namespace basin::models {

struct AttentionWeights {
  std::vector<float> norm;            // [hidden]
  std::vector<float> q_norm, k_norm;  // [d_head], over each head before rotation; or empty
  ops::WeightMatrix q, k, v, o;
};

struct FeedForwardWeights {
  std::vector<float> norm;  // [hidden]
  ops::WeightMatrix gate, up, down;
};

struct Layer {
  AttentionWeights attention;
  FeedForwardWeights feed_forward;
};

}  // namespace basin::models
