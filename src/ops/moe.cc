#include "ops/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "basin/base/error.h"

namespace basin::ops {

void route(const float* logits, std::int64_t tokens, std::int64_t experts, std::int64_t chosen,
           Routing& routing) {
  routing.tokens = tokens;
  routing.chosen = chosen;
  routing.expert.resize(static_cast<std::size_t>(tokens * chosen));
  routing.weight.resize(static_cast<std::size_t>(tokens * chosen));
  std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* row = logits + t * experts;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (std::isfinite(row[e])) continue;
      throw Error(ErrorCode::internal,
                  fmt::format("the router's logit of expert {} is {} for row {}", e, row[e], t));
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(
        order.begin(), order.begin() + chosen, order.end(),
        [&](std::int32_t a, std::int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
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
