// What a layer's attention output loses when only sink tokens and a window stay visible.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "basin/attention/attention.h"
#include "probe/run.h"

namespace basin::probe {
namespace {

constexpr std::int64_t kQueries = 32;  // spread over the text: a mean to a few percent at a small cost
constexpr std::int64_t kMostSinks = 64, kMostWindow = 8192;

std::vector<Pair> pairs_of(std::int64_t tokens) {
  std::vector<Pair> pairs;
  std::vector<std::int64_t> sinks = {0};
  for (const std::int64_t n : sink_counts(tokens)) {
    if (n <= kMostSinks) sinks.push_back(n);
  }
  for (const std::int64_t n : sinks) {
    for (const std::int64_t w : windows(tokens)) {
      if (w <= kMostWindow && n + w < tokens) pairs.push_back({n, w});
    }
  }
  return pairs;
}

}  // namespace

void measure_errors(const attention::Forward& problem, ThreadPool& pool, LayerResult& result) {
  const std::int64_t heads = problem.q.shape[1], d_v = problem.out.shape[2];
  const std::int64_t tokens = problem.sequences[0].q_tokens;
  result.pairs = pairs_of(tokens);
  const float none = std::numeric_limits<float>::quiet_NaN();
  result.pair_error.assign(result.pairs.size() * static_cast<std::size_t>(heads), none);
  result.pair_error_all.assign(result.pairs.size(), none);
  if (problem.spec.mask.window > 0 || problem.q_sink || problem.out.dtype != DType::f32) return;

  const auto row_bytes = static_cast<std::size_t>(heads * problem.q.shape[2] * block_bytes(problem.q.dtype));
  std::vector<std::byte> rows(static_cast<std::size_t>(kQueries) * row_bytes);
  std::vector<float> out(static_cast<std::size_t>(kQueries * heads * d_v));
  std::vector<attention::Sequence> sequences(static_cast<std::size_t>(kQueries));
  for (std::size_t i = 0; i < result.pairs.size(); ++i) {
    const Pair& pair = result.pairs[i];
    const std::int64_t hidden_from = pair.sink_tokens + pair.window;
    const std::int64_t count = std::min(kQueries, tokens - hidden_from);
    for (std::int64_t q = 0; q < count; ++q) {
      const std::int64_t position = hidden_from + (2 * q + 1) * (tokens - hidden_from) / (2 * count);
      attention::Sequence& sequence = sequences[static_cast<std::size_t>(q)];
      sequence = problem.sequences[0];
      sequence.q_begin = q;
      sequence.q_tokens = 1;
      sequence.kv_tokens = position + 1;
      for (std::int64_t h = 0; h < heads; ++h) {  // rows of q need not be dense
        const auto bytes = static_cast<std::size_t>(problem.q.shape[2] * block_bytes(problem.q.dtype));
        const auto* from =
            static_cast<const std::byte*>(problem.q.data) +
            ((problem.sequences[0].q_begin + position) * problem.q.stride[0] + h * problem.q.stride[1]) *
                block_bytes(problem.q.dtype);
        std::memcpy(
            rows.data() + static_cast<std::size_t>(q) * row_bytes + static_cast<std::size_t>(h) * bytes, from,
            bytes);
      }
    }
    attention::Forward cut = problem;
    cut.sequences = {sequences.data(), static_cast<std::size_t>(count)};
    cut.spec.mask.sink_tokens = pair.sink_tokens;
    cut.spec.mask.window = pair.window;
    cut.q = contiguous(static_cast<const void*>(rows.data()), problem.q.dtype,
                       {count, heads, problem.q.shape[2]});
    cut.out = contiguous(static_cast<void*>(out.data()), DType::f32, {count, heads, d_v});
    cut.lse = cut.lse_with_sink = nullptr;
    attention::forward(cut, attention::Backend::automatic, pool);

    std::vector<double> sum(static_cast<std::size_t>(heads), 0.0);
    double sum_all = 0.0;
    for (std::int64_t q = 0; q < count; ++q) {
      const std::int64_t position = sequences[static_cast<std::size_t>(q)].kv_tokens - 1;
      double error_all = 0.0, size_all = 0.0;
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* whole = static_cast<const float*>(problem.out.data) +
                             (problem.sequences[0].q_begin + position) * problem.out.stride[0] +
                             h * problem.out.stride[1];
        const float* part = out.data() + (q * heads + h) * d_v;
        double error = 0.0, size = 0.0;
        for (std::int64_t d = 0; d < d_v; ++d) {
          error += std::pow(static_cast<double>(part[d]) - static_cast<double>(whole[d]), 2);
          size += std::pow(static_cast<double>(whole[d]), 2);
        }
        error_all += error;
        size_all += size;
        if (size > 0.0) sum[static_cast<std::size_t>(h)] += std::sqrt(error / size);
      }
      if (size_all > 0.0) sum_all += std::sqrt(error_all / size_all);
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      result.pair_error[i * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)] =
          static_cast<float>(sum[static_cast<std::size_t>(h)] / static_cast<double>(count));
    }
    result.pair_error_all[i] = static_cast<float>(sum_all / static_cast<double>(count));
  }
}

}  // namespace basin::probe
