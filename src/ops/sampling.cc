#include "ops/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

struct Candidate {
  std::int32_t id;
  double logit;
  double probability = 0.0;
};

// SplitMix64 finaliser: a counter in, 64 well-mixed bits out.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Uniform in [0, 1), a function of seed and position only.
double uniform(std::uint64_t seed, std::int64_t position) {
  const std::uint64_t bits = mix(mix(seed) ^ static_cast<std::uint64_t>(position));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

void penalise(std::vector<float>& logits, double penalty, std::span<const std::int32_t> history) {
  const std::unordered_set<std::int32_t> seen(history.begin(), history.end());
  for (const std::int32_t id : seen) {
    if (id < 0 || static_cast<std::size_t>(id) >= logits.size()) continue;
    float& x = logits[static_cast<std::size_t>(id)];
    x = static_cast<float>(x > 0 ? static_cast<double>(x) / penalty : static_cast<double>(x) * penalty);
  }
}

std::int32_t largest(std::span<const float> logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Softmax over the candidates, which are sorted by descending logit.
void set_probabilities(std::vector<Candidate>& candidates) {
  double sum = 0;
  for (Candidate& c : candidates) sum += c.probability = std::exp(c.logit - candidates.front().logit);
  for (Candidate& c : candidates) c.probability /= sum;
}

// The shortest prefix whose mass reaches top_p.
void keep_top_p(std::vector<Candidate>& candidates, double top_p) {
  double mass = 0;
  std::size_t kept = 0;
  while (kept < candidates.size() && mass < top_p) mass += candidates[kept++].probability;
  candidates.resize(std::max<std::size_t>(kept, 1));
}

void keep_min_p(std::vector<Candidate>& candidates, double min_p) {
  const double least = min_p * candidates.front().probability;
  const auto end = std::find_if(candidates.begin() + 1, candidates.end(),
                                [&](const Candidate& c) { return c.probability < least; });
  candidates.erase(end, candidates.end());
}

}  // namespace

void check(const SamplingOptions& o) {
  const auto refuse = [](const char* option, double value, const char* allowed) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{} is {}; allowed is {}", option, value, allowed));
  };
  if (!(o.temperature >= 0) || !std::isfinite(o.temperature))
    refuse("temperature", o.temperature, "0 (greedy) or more");
  if (o.top_k < 0) refuse("top_k", static_cast<double>(o.top_k), "0 (off) or more");
  if (!(o.top_p > 0 && o.top_p <= 1)) refuse("top_p", o.top_p, "above 0 up to 1 (off)");
  if (!(o.min_p >= 0 && o.min_p <= 1)) refuse("min_p", o.min_p, "0 (off) to 1");
  if (!(o.repetition_penalty > 0) || !std::isfinite(o.repetition_penalty)) {
    refuse("repetition_penalty", o.repetition_penalty, "above 0; 1 is off");
  }
}

std::int32_t sample(std::span<const float> logits, const SamplingOptions& options,
                    std::span<const std::int32_t> history, std::int64_t logical_position) {
  check(options);
  if (logits.empty()) throw Error(ErrorCode::internal, "no logits to sample from");
  for (const float x : logits) {
    if (std::isnan(x))
      throw Error(ErrorCode::internal, fmt::format("a logit at position {} is NaN", logical_position));
  }
  std::vector<float> penalised;
  if (options.repetition_penalty != 1.0) {
    penalised.assign(logits.begin(), logits.end());
    penalise(penalised, options.repetition_penalty, history);
    logits = penalised;
  }
  if (options.temperature == 0.0) return largest(logits);

  std::vector<Candidate> candidates;
  candidates.reserve(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    candidates.push_back(
        {static_cast<std::int32_t>(i), static_cast<double>(logits[i]) / options.temperature});
  }
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  if (options.top_k > 0 && static_cast<std::size_t>(options.top_k) < candidates.size()) {
    std::partial_sort(candidates.begin(), candidates.begin() + options.top_k, candidates.end(), before);
    candidates.resize(static_cast<std::size_t>(options.top_k));
  } else {
    std::sort(candidates.begin(), candidates.end(), before);
  }
  if (!std::isfinite(candidates.front().logit))
    return candidates.front().id;  // +inf takes all; all -inf: lowest id
  set_probabilities(candidates);
  if (options.top_p < 1.0) keep_top_p(candidates, options.top_p);
  if (options.min_p > 0.0) keep_min_p(candidates, options.min_p);

  double mass = 0;
  for (const Candidate& c : candidates) mass += c.probability;
  double left = uniform(options.seed, logical_position) * mass;
  for (const Candidate& c : candidates) {
    left -= c.probability;
    if (left < 0) return c.id;
  }
  return candidates.back().id;
}

}  // namespace basin::ops
