// From one row of logits to one token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace basin::ops {

struct SamplingOptions {
  double temperature = 0.0;         // 0 = greedy
  std::int64_t top_k = 0;           // 0 = off
  double top_p = 1.0;               // 1 = off
  double min_p = 0.0;               // 0 = off
  double repetition_penalty = 1.0;  // 1 = off; divides positive and multiplies negative logits of seen tokens
  std::uint64_t seed = 0;
};

/// The tokens of a text, each once: what the repetition penalty weakens. Kept up as the text grows, so that a step costs
/// what the vocabulary does and not what the text has become.
class SeenTokens {
 public:
  void add(std::span<const std::int32_t> tokens);
  std::span<const std::int32_t> ids() const { return ids_; }  // by first appearance

 private:
  std::vector<bool> seen_;  // by id
  std::vector<std::int32_t> ids_;
};

/// Throws Error(invalid_argument) naming the option, the value given and the range allowed.
void check(const SamplingOptions& options);

/// Picks a token. Deterministic: a function of logits, options, `seen` (for the penalty) and
/// `logical_position` (which keys the random number together with the seed) only. Ties go to the lowest id.
/// Order: penalty, temperature, top_k, top_p, min_p. NaN logits throw Error(internal).
std::int32_t sample(std::span<const float> logits, const SamplingOptions& options, const SeenTokens& seen,
                    std::int64_t logical_position);

}  // namespace basin::ops
