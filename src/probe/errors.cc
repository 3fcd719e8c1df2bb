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

// Attention over some of the keys, without the learned sink.
struct Part {
  std::vector<float> out;  // [queries, heads, d_v]
  std::vector<float> lse;  // [heads, queries]
};

// Some queries of a layer, which look at a part of their keys at a time: the parts of a pair are joined by their lse, so
// that a window's keys are read once for all sink counts.
class Queries {
 public:
  Queries(const attention::Forward& problem, std::vector<std::int64_t> positions)
      : problem_(problem), positions_(std::move(positions)) {
    const std::size_t head_bytes = static_cast<std::size_t>(d_qk() * block_bytes(problem.q.dtype));
    rows_.resize(positions_.size() * static_cast<std::size_t>(heads()) * head_bytes);
    std::byte* to = rows_.data();
    for (const std::int64_t position : positions_) {
      for (std::int64_t h = 0; h < heads(); ++h, to += head_bytes) {  // rows of q need not be dense
        const auto* from =
            static_cast<const std::byte*>(problem.q.data) +
            (row(position) * problem.q.stride[0] + h * problem.q.stride[1]) * block_bytes(problem.q.dtype);
        std::memcpy(to, from, head_bytes);
      }
    }
  }

  Part see_first(std::int64_t keys, ThreadPool& pool) const {
    return see([&](std::int64_t) { return keys; }, 0, pool);
  }
  Part see_last(std::int64_t keys, ThreadPool& pool) const {
    return see([](std::int64_t position) { return position + 1; }, keys, pool);
  }

  // Means over the queries of |O' - O| / |O|: of each head, and of all together.
  void errors(const Part* first, const Part& last, float* of_head, float& of_all) const {
    const auto count = static_cast<std::int64_t>(positions_.size());
    std::vector<double> sum(static_cast<std::size_t>(heads()), 0.0);
    double sum_all = 0.0;
    for (std::int64_t q = 0; q < count; ++q) {
      double error_all = 0.0, size_all = 0.0;
      for (std::int64_t h = 0; h < heads(); ++h) {
        const auto at = static_cast<std::size_t>(h * count + q);
        const double sink = problem_.sink_logit != nullptr ? static_cast<double>(problem_.sink_logit[h])
                                                           : -std::numeric_limits<double>::infinity();
        const double lse_first =
            first != nullptr ? static_cast<double>(first->lse[at]) : -std::numeric_limits<double>::infinity();
        const double lse_last = static_cast<double>(last.lse[at]);
        const double top = std::max({lse_first, lse_last, sink});
        const double weight_first = std::exp(lse_first - top), weight_last = std::exp(lse_last - top);
        const double total = weight_first + weight_last + std::exp(sink - top);
        const float* whole = static_cast<const float*>(problem_.out.data) +
                             row(positions_[static_cast<std::size_t>(q)]) * problem_.out.stride[0] +
                             h * problem_.out.stride[1];
        const auto begin = static_cast<std::size_t>((q * heads() + h) * d_v());
        double error = 0.0, size = 0.0;
        for (std::int64_t d = 0; d < d_v(); ++d) {
          const std::size_t i = begin + static_cast<std::size_t>(d);
          double part = weight_last * static_cast<double>(last.out[i]);
          if (first != nullptr) part += weight_first * static_cast<double>(first->out[i]);
          error += std::pow(part / total - static_cast<double>(whole[d]), 2);
          size += std::pow(static_cast<double>(whole[d]), 2);
        }
        error_all += error;
        size_all += size;
        if (size > 0.0) sum[static_cast<std::size_t>(h)] += std::sqrt(error / size);
      }
      if (size_all > 0.0) sum_all += std::sqrt(error_all / size_all);
    }
    for (std::int64_t h = 0; h < heads(); ++h) {
      of_head[h] = static_cast<float>(sum[static_cast<std::size_t>(h)] / static_cast<double>(count));
    }
    of_all = static_cast<float>(sum_all / static_cast<double>(count));
  }

 private:
  std::int64_t heads() const { return problem_.q.shape[1]; }
  std::int64_t d_qk() const { return problem_.q.shape[2]; }
  std::int64_t d_v() const { return problem_.out.shape[2]; }
  std::int64_t row(std::int64_t position) const { return problem_.sequences[0].q_begin + position; }

  // Keys [0, end(position)), of which the last `window`; 0 = all.
  template <typename End>
  Part see(const End& end, std::int64_t window, ThreadPool& pool) const {
    const auto count = static_cast<std::int64_t>(positions_.size());
    std::vector<attention::Sequence> sequences(positions_.size(), problem_.sequences[0]);
    for (std::size_t q = 0; q < sequences.size(); ++q) {
      sequences[q].q_begin = static_cast<std::int64_t>(q);
      sequences[q].q_tokens = 1;
      sequences[q].kv_tokens = end(positions_[q]);
    }
    Part part;
    part.out.resize(static_cast<std::size_t>(count * heads() * d_v()));
    part.lse.resize(static_cast<std::size_t>(count * heads()));
    attention::Forward cut = problem_;
    cut.sequences = sequences;
    cut.spec.mask.sink_tokens = 0;
    cut.spec.mask.window = window;
    cut.sink_logit = nullptr;
    cut.q = contiguous(static_cast<const void*>(rows_.data()), problem_.q.dtype, {count, heads(), d_qk()});
    cut.out = contiguous(static_cast<void*>(part.out.data()), DType::f32, {count, heads(), d_v()});
    cut.lse = part.lse.data();
    cut.lse_with_sink = nullptr;
    attention::forward(cut, attention::Backend::automatic, pool);
    return part;
  }

  const attention::Forward& problem_;
  std::vector<std::int64_t> positions_;
  std::vector<std::byte> rows_;
};

// Up to kQueries positions from `first` on, in the middles of equal parts.
std::vector<std::int64_t> spread(std::int64_t first, std::int64_t tokens) {
  const std::int64_t count = std::min(kQueries, tokens - first);
  std::vector<std::int64_t> positions;
  for (std::int64_t q = 0; q < count; ++q) {
    positions.push_back(first + (2 * q + 1) * (tokens - first) / (2 * count));
  }
  return positions;
}

}  // namespace

void measure_errors(const attention::Forward& problem, ThreadPool& pool, LayerResult& result) {
  const std::int64_t tokens = problem.sequences[0].q_tokens;
  const auto heads = static_cast<std::size_t>(problem.q.shape[1]);
  result.pairs = pairs_of(tokens);
  const float none = std::numeric_limits<float>::quiet_NaN();
  result.pair_error.assign(result.pairs.size() * heads, none);
  result.pair_error_all.assign(result.pairs.size(), none);
  if (problem.spec.mask.window > 0 || problem.q_sink || problem.out.dtype != DType::f32) return;

  for (const std::int64_t window : windows(tokens)) {
    std::int64_t shown = 0;  // most that a pair of this window shows
    for (const Pair& pair : result.pairs) {
      if (pair.window == window) shown = std::max(shown, pair.sink_tokens + pair.window);
    }
    if (shown == 0) continue;
    // All pairs of a window are compared on the same queries.
    const Queries queries(problem, spread(shown, tokens));
    const Part last = queries.see_last(window, pool);
    for (std::size_t i = 0; i < result.pairs.size(); ++i) {
      if (result.pairs[i].window != window) continue;
      const std::int64_t sinks = result.pairs[i].sink_tokens;
      Part first;
      if (sinks > 0) first = queries.see_first(sinks, pool);
      queries.errors(sinks > 0 ? &first : nullptr, last, result.pair_error.data() + i * heads,
                     result.pair_error_all[i]);
    }
  }
}

}  // namespace basin::probe
