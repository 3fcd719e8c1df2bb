#include "attention/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "attention/reference/rows.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"

namespace basin::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kSentinel = 12345.0f;
constexpr std::byte kSentinelByte{0x5a};

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

void put(std::vector<std::byte>& to, DType dtype, std::int64_t i, double x) {
  attention::reference::store(to.data(), dtype, i, x);
}

std::vector<double> draw_values(std::mt19937_64& random, std::int64_t count) {
  std::normal_distribution<double> normal;
  std::vector<double> values(index(count));
  // Multiples of 1/16 up to 4 in magnitude: exact in every dtype.
  for (double& value : values) value = std::clamp(std::round(normal(random) * 16) / 16, -4.0, 4.0);
  return values;
}

View make_view(std::vector<std::byte>& memory, DType dtype, std::vector<std::int64_t> shape,
               std::int64_t gap) {
  View view;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[index(i)] = shape[index(i)];
    view.stride[index(i)] = stride;
    stride = stride * shape[index(i)] + gap;
  }
  memory.resize(index((stride + 1) * block_bytes(dtype)));
  view.data = memory.data();
  return view;
}

}  // namespace

std::int64_t Problem::total_q() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0},
                         [](auto s, auto l) { return s + l.q; });
}
std::int64_t Problem::total_kv() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0},
                         [](auto s, auto l) { return s + l.kv; });
}

void fill(Problem& problem, const Draw& draw) {
  std::mt19937_64 random(draw.seed);
  if (problem.spec.scale == 0) problem.spec.scale = 1 / std::sqrt(static_cast<double>(problem.d_qk));
  problem.q = draw_values(random, problem.total_q() * problem.h_q * problem.d_qk);
  problem.k = draw_values(random, problem.total_kv() * problem.h_kv * problem.d_qk);
  problem.v = draw_values(random, problem.total_kv() * problem.h_kv * problem.d_v);
  problem.q_sink.clear();
  if (draw.q_sink) problem.q_sink = draw_values(random, problem.total_q() * problem.h_q * problem.d_qk);
  problem.sink_logit.clear();
  for (std::int64_t h = 0; draw.sink_logit && h < problem.h_q; ++h)
    problem.sink_logit.push_back(0.75f - 0.5f * static_cast<float>(h));
}

Stored::Stored(const Problem& problem, const Layout& layout) : problem_(problem) {
  const std::int64_t gap = layout.hostile ? 16 : 0;
  const std::int64_t row_gap = layout.hostile ? 3 : 0;  // rows before, between and behind the sequences
  std::int64_t rows = row_gap;
  for (const Lengths& length : problem.lengths) {
    attention::Sequence sequence;
    sequence.q_begin = rows;
    sequence.q_tokens = length.q;
    sequence.kv_tokens = length.kv;
    sequences_.push_back(sequence);
    rows += length.q + row_gap;
  }
  const auto place_queries = [&](std::vector<std::byte>& memory, const std::vector<double>& values) {
    const View view = make_view(memory, layout.dtype, {rows, problem.h_q, problem.d_qk}, gap);
    for (std::size_t i = 0; i < memory.size() / index(block_bytes(layout.dtype)); ++i)
      put(memory, layout.dtype, static_cast<std::int64_t>(i), kNan);
    std::size_t at = 0;
    for (const auto& sequence : sequences_) {
      for (std::int64_t i = 0; i < sequence.q_tokens * problem.h_q; ++i) {
        const std::int64_t offset =
            (sequence.q_begin + i / problem.h_q) * view.stride[0] + i % problem.h_q * view.stride[1];
        for (std::int64_t d = 0; d < problem.d_qk; ++d) put(memory, layout.dtype, offset + d, values[at++]);
      }
    }
    return view;
  };
  forward.spec = problem.spec;
  forward.q = place_queries(q_, problem.q);
  if (!problem.q_sink.empty()) forward.q_sink = place_queries(q_sink_, problem.q_sink);
  place_keys(problem, layout);
  forward.out = make_view(out_, layout.out_dtype, {rows, problem.h_q, problem.d_v}, gap);
  std::fill(out_.begin(), out_.end(), kSentinelByte);
  lse_.assign(index(rows * problem.h_q), kSentinel);
  lse_with_sink_ = lse_;
  forward.lse = lse_.data();
  forward.lse_with_sink = lse_with_sink_.data();
  if (!problem.sink_logit.empty()) forward.sink_logit = problem.sink_logit.data();
  forward.sequences = sequences_;
}

void Stored::place_keys(const Problem& problem, const Layout& layout) {
  const std::int64_t gap = layout.hostile ? 16 : 0;
  const std::int64_t row_gap = layout.hostile ? 5 : 0;
  const std::int64_t page = layout.page_tokens;
  std::int64_t rows = row_gap, page_count = 0;
  for (auto& sequence : sequences_) {
    sequence.kv_begin = rows;
    rows += sequence.kv_tokens + row_gap;
    if (page > 0) page_count += (sequence.kv_tokens + page - 1) / page;
  }
  const auto shape = [&](std::int64_t d) {
    return page > 0 ? std::vector<std::int64_t>{page_count + 2, page, problem.h_kv, d}
                    : std::vector<std::int64_t>{rows, problem.h_kv, d};
  };
  const View k = make_view(k_, layout.dtype, shape(problem.d_qk), gap);
  const View v = make_view(v_, layout.dtype, shape(problem.d_v), gap);
  for (auto* memory : {&k_, &v_}) {
    for (std::size_t i = 0; i < memory->size() / index(block_bytes(layout.dtype)); ++i)
      put(*memory, layout.dtype, static_cast<std::int64_t>(i), kNan);
  }
  forward.k = k;
  forward.v = v;
  pages_.resize(sequences_.size());
  std::int64_t token = 0, used_pages = 0;
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    auto& sequence = sequences_[s];
    std::vector<bool> seen(index(sequence.kv_tokens), !layout.hostile);
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      for (const std::int64_t j : attention::reference::keys_of(problem.spec.mask, sequence, i))
        seen[index(j)] = true;
    }
    if (page > 0) {
      const std::int64_t count = (sequence.kv_tokens + page - 1) / page;
      for (std::int64_t n = 0; n < count; ++n, ++used_pages) {
        bool needed = false;
        for (std::int64_t j = n * page; j < std::min((n + 1) * page, sequence.kv_tokens); ++j)
          needed |= seen[index(j)];
        // Back to front, so that pages of a sequence are neither ascending nor adjacent to 0.
        pages_[s].push_back(needed ? static_cast<std::int32_t>(page_count - used_pages) : -1);
      }
      sequence.pages = pages_[s].data();
    }
    for (std::int64_t j = 0; j < sequence.kv_tokens; ++j, ++token) {
      if (!seen[index(j)]) continue;
      for (std::int64_t h = 0; h < problem.h_kv; ++h) {
        const std::int64_t from = token * problem.h_kv + h;
        for (std::int64_t d = 0; d < problem.d_qk; ++d)
          put(k_, layout.dtype, attention::reference::key_at(k, sequence, j, h) + d,
              problem.k[index(from * problem.d_qk + d)]);
        for (std::int64_t d = 0; d < problem.d_v; ++d)
          put(v_, layout.dtype, attention::reference::key_at(v, sequence, j, h) + d,
              problem.v[index(from * problem.d_v + d)]);
      }
    }
  }
}

Output Stored::output() const {
  Output result;
  const View& out = forward.out;
  const std::int64_t rows = out.shape[0], size = block_bytes(out.dtype);
  std::vector<bool> written(out_.size() / index(size), false);
  for (const auto& sequence : sequences_) {
    for (std::int64_t i = 0; i < sequence.q_tokens * problem_.h_q; ++i) {
      const std::int64_t offset =
          (sequence.q_begin + i / problem_.h_q) * out.stride[0] + i % problem_.h_q * out.stride[1];
      for (std::int64_t d = 0; d < problem_.d_v; ++d) {
        written[index(offset + d)] = true;
        result.out.push_back(attention::reference::load(out.data, out.dtype, offset + d));
      }
    }
  }
  std::int64_t changed = 0;
  for (std::size_t i = 0; i < out_.size(); ++i) {
    if (!written[i / index(size)] && out_[i] != kSentinelByte) ++changed;
  }
  EXPECT_EQ(changed, 0) << "bytes of out outside the rows were written";
  const auto pick = [&](const std::vector<float>& from, std::vector<float>& to) {
    std::vector<bool> is_row(index(rows), false);
    for (std::int64_t h = 0; h < problem_.h_q; ++h) {
      for (const auto& sequence : sequences_) {
        for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
          is_row[index(sequence.q_begin + i)] = true;
          to.push_back(from[index(h * rows + sequence.q_begin + i)]);
        }
      }
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (is_row[i % index(rows)]) continue;
      EXPECT_EQ(from[i], kSentinel) << "an lse outside the rows was written";
    }
  };
  pick(lse_, result.lse);
  pick(lse_with_sink_, result.lse_with_sink);
  return result;
}

Output run(const Problem& problem, const Layout& layout, attention::Backend backend, int threads) {
  Stored stored(problem, layout);
  ThreadPool pool(threads);
  attention::forward(stored.forward, backend, pool);
  return stored.output();
}

Output run_reference(const Problem& problem, const Layout& layout, bool storage_precision) {
  Layout plain = layout;
  plain.hostile = false;
  plain.page_tokens = 0;
  if (!storage_precision) plain.out_dtype = DType::f64;
  Stored stored(problem, plain);
  attention::check(stored.forward);
  attention::reference::forward(stored.forward, storage_precision ? attention::reference::Precision::storage
                                                                  : attention::reference::Precision::f64);
  return stored.output();
}

namespace {

template <typename T>
double difference(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // also equal infinities
    const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(d <= worst)) worst = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
  }
  return worst;
}

}  // namespace

double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  return difference(a, b);
}
double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  return difference(a, b);
}

}  // namespace basin::test
