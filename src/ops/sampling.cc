#include "ops/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

struct Candidate {
  std::int32_t id;
  double logit;   // after the temperature, minus the largest
  double weight;  // exp(logit)
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

void penalise(std::vector<float>& logits, double penalty, const SeenTokens& seen) {
  for (const std::int32_t id : seen.ids()) {
    if (static_cast<std::size_t>(id) >= logits.size()) continue;
    float& x = logits[static_cast<std::size_t>(id)];
    x = static_cast<float>(x > 0 ? static_cast<double>(x) / penalty : static_cast<double>(x) * penalty);
  }
}

std::int32_t largest(std::span<const float> logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

bool after(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit < b.logit : a.id > b.id;
}

// Candidates by descending logit, equal ones by ascending id. Only as many are put in order as are asked for: a
// vocabulary is large, and what top_p or min_p keeps of it usually small.
class Descending {
 public:
  explicit Descending(std::vector<Candidate> all) : all_(std::move(all)), rest_(all_.size()) {
    std::make_heap(all_.begin(), all_.end(), after);
  }

  std::size_t size() const { return all_.size(); }

  const Candidate& operator[](std::size_t rank) {
    while (all_.size() - rest_ <= rank) {
      std::pop_heap(all_.begin(), all_.begin() + static_cast<std::ptrdiff_t>(rest_), after);
      --rest_;
    }
    return all_[all_.size() - 1 - rank];
  }

 private:
  std::vector<Candidate> all_;  // a heap of `rest_`, then those taken, the largest last
  std::size_t rest_;
};

// The one on which `left` of the summed weights falls, walking over count candidates.
std::int32_t pick(auto&& candidates, std::size_t count, double left) {
  for (std::size_t i = 0; i + 1 < count; ++i) {
    left -= candidates[i].weight;
    if (left < 0) return candidates[i].id;
  }
  // Rounding may leave a little after the last; never hand out one that has no weight at all.
  std::size_t last = count - 1;
  while (last > 0 && candidates[last].weight == 0) --last;
  return candidates[last].id;
}

}  // namespace

void SeenTokens::add(std::span<const std::int32_t> tokens) {
  for (const std::int32_t id : tokens) {
    if (id < 0) throw Error(ErrorCode::internal, fmt::format("{} is not a token id", id));
    const auto index = static_cast<std::size_t>(id);
    if (index >= seen_.size()) seen_.resize(std::max(index + 1, 2 * seen_.size()));
    if (seen_[index]) continue;
    seen_[index] = true;
    ids_.push_back(id);
  }
}

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

std::int32_t sample(std::span<const float> logits, const SamplingOptions& options, const SeenTokens& seen,
                    std::int64_t logical_position) {
  check(options);
  if (logits.empty()) throw Error(ErrorCode::internal, "no logits to sample from");
  for (const float x : logits) {
    if (std::isnan(x))
      throw Error(ErrorCode::internal, fmt::format("a logit at position {} is NaN", logical_position));
  }
  std::vector<float> penalised;
  if (options.repetition_penalty != 1.0) {
    penalised.assign(logits.begin(), logits.end());
    penalise(penalised, options.repetition_penalty, seen);
    logits = penalised;
  }
  if (options.temperature == 0.0) return largest(logits);

  const std::int32_t best = largest(logits);
  const auto peak = static_cast<double>(logits[static_cast<std::size_t>(best)]);
  if (!std::isfinite(peak)) return best;  // +inf takes all; all -inf: lowest id
  std::vector<Candidate> all;
  all.reserve(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double logit = (static_cast<double>(logits[i]) - peak) / options.temperature;
    all.push_back({static_cast<std::int32_t>(i), logit, 0.0});
  }
  if (options.top_k > 0 && static_cast<std::uint64_t>(options.top_k) < all.size()) {
    const auto end = all.begin() + options.top_k;
    std::partial_sort(all.begin(), end, all.end(),
                      [](const Candidate& a, const Candidate& b) { return after(b, a); });
    all.erase(end, all.end());
  }
  double total = 0;
  for (Candidate& candidate : all) total += candidate.weight = std::exp(candidate.logit);
  const double random = uniform(options.seed, logical_position);
  if (options.top_p == 1.0 && options.min_p == 0.0) return pick(all, all.size(), random * total);

  Descending ranked(std::move(all));
  std::size_t kept = ranked.size();
  if (options.top_p < 1.0) {  // the shortest prefix whose mass reaches top_p
    double mass = 0;
    std::size_t reached = 0;
    while (reached < kept && mass < options.top_p * total) mass += ranked[reached++].weight;
    kept = reached;
    total = mass;
  }
  if (options.min_p > 0.0) {
    const double least = options.min_p * ranked[0].weight;
    std::size_t enough = 0;
    total = 0;
    while (enough < kept && ranked[enough].weight >= least) total += ranked[enough++].weight;
    kept = enough;
  }
  return pick(ranked, kept, random * total);
}

}  // namespace basin::ops
