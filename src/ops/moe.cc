#include "ops/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

void start(Routing& routing, std::int64_t tokens, std::int64_t chosen) {
  routing.tokens = tokens;
  routing.chosen = chosen;
  routing.expert.resize(static_cast<std::size_t>(tokens * chosen));
  routing.weight.resize(static_cast<std::size_t>(tokens * chosen));
}

void check_finite(const float* row, std::int64_t experts, std::int64_t token) {
  for (std::int64_t e = 0; e < experts; ++e) {
    if (std::isfinite(row[e])) continue;
    throw Error(ErrorCode::internal,
                fmt::format("the router's logit of expert {} is {} for row {}", e, row[e], token));
  }
}

// The first `chosen` of `order` are then the numbers of the largest values, largest first, of equals the lower number first.
void largest_first(const float* value, std::vector<std::int32_t>& order, std::int64_t chosen) {
  std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](std::int32_t a, std::int32_t b) {
    return value[a] != value[b] ? value[a] > value[b] : a < b;
  });
}

}  // namespace

void route(const float* logits, std::int64_t tokens, std::int64_t experts, std::int64_t chosen,
           Routing& routing) {
  start(routing, tokens, chosen);
  std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* row = logits + t * experts;
    check_finite(row, experts, t);
    std::iota(order.begin(), order.end(), 0);
    largest_first(row, order, chosen);
    std::int32_t* expert = routing.expert.data() + t * chosen;
    float* weight = routing.weight.data() + t * chosen;
    float sum = 0.0f;
    for (std::int64_t i = 0; i < chosen; ++i) {
      expert[i] = order[static_cast<std::size_t>(i)];
      weight[i] = std::exp(row[expert[i]] - row[expert[0]]);
      sum += weight[i];
    }
    for (std::int64_t i = 0; i < chosen; ++i) weight[i] /= sum;
  }
}

void route_grouped(const float* logits, const float* correction, std::int64_t tokens, std::int64_t experts,
                   const GroupedChoice& choice, Routing& routing) {
  start(routing, tokens, choice.chosen);
  const std::int64_t size = experts / choice.groups;
  std::vector<float> score(static_cast<std::size_t>(experts)), wanted(score);
  std::vector<float> group_score(static_cast<std::size_t>(choice.groups));
  std::vector<std::int32_t> groups, order;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* row = logits + t * experts;
    check_finite(row, experts, t);
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      score[at] = 1.0f / (1.0f + std::exp(-row[e]));
      wanted[at] = score[at] + correction[e];
    }
    groups.resize(static_cast<std::size_t>(choice.groups));
    std::iota(groups.begin(), groups.end(), 0);
    if (choice.chosen_groups < choice.groups) {
      for (std::int64_t g = 0; g < choice.groups; ++g) {
        std::vector<float> best(wanted.begin() + g * size, wanted.begin() + (g + 1) * size);
        std::partial_sort(best.begin(), best.begin() + 2, best.end(), std::greater<>());
        group_score[static_cast<std::size_t>(g)] = best[0] + best[1];
      }
      largest_first(group_score.data(), groups, choice.chosen_groups);
      groups.resize(static_cast<std::size_t>(choice.chosen_groups));
    }
    order.clear();
    for (const std::int32_t g : groups) {
      for (std::int64_t e = g * size; e < (g + 1) * size; ++e) order.push_back(static_cast<std::int32_t>(e));
    }
    largest_first(wanted.data(), order, choice.chosen);
    std::int32_t* expert = routing.expert.data() + t * choice.chosen;
    float* weight = routing.weight.data() + t * choice.chosen;
    float sum = 0.0f;
    for (std::int64_t i = 0; i < choice.chosen; ++i) {
      expert[i] = order[static_cast<std::size_t>(i)];
      weight[i] = score[static_cast<std::size_t>(expert[i])];
      sum += weight[i];
    }
    const float factor = static_cast<float>(choice.scale) / (choice.normalise ? sum + 1e-20f : 1.0f);
    for (std::int64_t i = 0; i < choice.chosen; ++i) weight[i] *= factor;
  }
}

void weigh(const Routing& routing, const float* answers, std::int64_t width, float* y, ThreadPool& pool) {
  constexpr std::int64_t kTokensPerTask = 4;
  const std::int64_t tasks = (routing.tokens + kTokensPerTask - 1) / kTokensPerTask;
  pool.parallel_for(tasks, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(routing.tokens, (task + 1) * kTokensPerTask);
    for (std::int64_t t = task * kTokensPerTask; t < end; ++t) {
      float* to = y + t * width;
      std::fill(to, to + width, 0.0f);
      for (std::int64_t i = t * routing.chosen; i < (t + 1) * routing.chosen; ++i) {
        const float weight = routing.weight[static_cast<std::size_t>(i)];
        const float* from = answers + i * width;
        for (std::int64_t k = 0; k < width; ++k) to[k] += weight * from[k];
      }
    }
  });
}

}  // namespace basin::ops
