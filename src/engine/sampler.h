// Chooses the tokens of one sequence, and remembers what penalties need.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/request.h"

namespace basin::engine {

/// log softmax of `logits` at `id`, and of the `top` likeliest (ties: lowest id first).
TokenLogprob logprob_of(std::span<const float> logits, std::int32_t id, std::int64_t top);

class Sampler {
 public:
  Sampler(const SamplingRequest& request, std::span<const std::int32_t> prompt);

  /// A function of the logits, the request, what was chosen before and the position: not of company.
  std::int32_t choose(std::span<const float> logits, std::int64_t logical_position);

 private:
  SamplingRequest request_;
  ops::SeenTokens seen_;
  std::unordered_map<std::int32_t, std::int64_t> chosen_;  // how often
  std::vector<float> adjusted_;
};

}  // namespace basin::engine
