#include "engine/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "basin/base/error.h"

namespace basin::engine {

void check(const SamplingRequest& sampling, std::int64_t vocabulary) {
  ops::check(sampling.options);
  const auto check_penalty = [](const char* option, double value) {
    if (value >= -2.0 && value <= 2.0) return;
    throw Error(ErrorCode::invalid_argument, fmt::format("{} is {}; allowed is -2 to 2", option, value));
  };
  check_penalty("presence_penalty", sampling.presence_penalty);
  check_penalty("frequency_penalty", sampling.frequency_penalty);
  for (const auto& [id, bias] : sampling.logit_bias) {
    if (id < 0 || id >= vocabulary)
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("logit_bias names token {}; the vocabulary has {}", id, vocabulary));
    if (!(bias >= -100.0 && bias <= 100.0))
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("logit_bias of token {} is {}; allowed is -100 to 100", id, bias));
  }
}

TokenLogprob logprob_of(std::span<const float> logits, std::int32_t id, std::int64_t top) {
  const auto peak = static_cast<double>(*std::ranges::max_element(logits));
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - peak);
  const double log_sum = peak + std::log(sum);
  const auto logprob = [&](std::int32_t token) {
    return static_cast<double>(logits[static_cast<std::size_t>(token)]) - log_sum;
  };
  TokenLogprob result{id, logprob(id), {}};
  if (top <= 0) return result;
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto count = std::min<std::ptrdiff_t>(top, std::ssize(ids));
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const std::int32_t token = ids[static_cast<std::size_t>(i)];
    result.top.emplace_back(token, logprob(token));
  }
  return result;
}

Sampler::Sampler(const SamplingRequest& request, std::span<const std::int32_t> prompt) : request_(request) {
  if (request.options.repetition_penalty != 1.0) seen_.add(prompt);
}

std::int32_t Sampler::choose(std::span<const float> logits, std::int64_t logical_position) {
  const bool penalised = request_.presence_penalty != 0.0 || request_.frequency_penalty != 0.0;
  if (!request_.logit_bias.empty() || (penalised && !chosen_.empty())) {
    adjusted_.assign(logits.begin(), logits.end());
    const auto add = [&](std::int32_t id, double amount) {
      float& x = adjusted_[static_cast<std::size_t>(id)];
      x = static_cast<float>(static_cast<double>(x) + amount);
    };
    for (const auto& [id, bias] : request_.logit_bias) add(id, bias);
    for (const auto& [id, times] : chosen_)
      add(id, -request_.presence_penalty - request_.frequency_penalty * static_cast<double>(times));
    logits = adjusted_;
  }
  const std::int32_t token = ops::sample(logits, request_.options, seen_, logical_position);
  if (request_.options.repetition_penalty != 1.0) seen_.add({&token, 1});
  if (penalised) ++chosen_[token];
  return token;
}

}  // namespace basin::engine
