// Mixture of experts: which experts a token goes to, and what becomes of their answers. Each token by itself, in a fixed
// order, so that batching never changes one.
#pragma once

#include <cstdint>
#include <vector>

#include "basin/base/thread_pool.h"

namespace basin::ops {

/// Where tokens go: for each its `chosen` experts and their weights.
struct Routing {
  std::int64_t tokens = 0, chosen = 0;
  std::vector<std::int32_t> expert;  // [tokens, chosen]
  std::vector<float> weight;         // [tokens, chosen]
};

/// The experts with the largest logits, largest first and of equals the lower number first; weights are the softmax of
/// their logits alone. Throws Error(internal) when a logit is not finite: nobody can say where such a token goes.
void route(const float* logits /*[tokens, experts]*/, std::int64_t tokens, std::int64_t experts,
           std::int64_t chosen, Routing& routing);

/// Routing of DeepSeek-V3: experts in equal groups, scores sigmoid(logit). A correction of each expert is added to its score for
/// the choice only: the groups with the largest sums of their two best, and of those groups the best experts; of equals the
/// lower number. Weights are the plain scores, divided by their sum if `normalise`, times `scale`.
struct GroupedChoice {
  std::int64_t chosen = 1, groups = 1, chosen_groups = 1;
  bool normalise = true;
  double scale = 1.0;
};
void route_grouped(const float* logits /*[tokens, experts]*/, const float* correction /*[experts]*/,
                   std::int64_t tokens, std::int64_t experts, const GroupedChoice& choice, Routing& routing);

/// y[t, :] = sum over the token's experts, in their order, of weight times answer.
void weigh(const Routing& routing, const float* answers /*[tokens, chosen, width]*/, std::int64_t width,
           float* y /*[tokens, width]*/, ThreadPool& pool);

}  // namespace basin::ops
