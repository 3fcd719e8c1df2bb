#include <limits>

#include "attention/reference/rows.h"
#include "basin/attention/reference.h"

namespace basin::attention::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Double copies of a gradient, so that sums over rows and query heads are not rounded on the way.
struct Gradient {
  const View& view;
  std::vector<double> sum;

  explicit Gradient(const View& v) : view(v) {
    std::int64_t last = 1;
    for (int i = 0; i < v.rank; ++i) {
      const auto n = static_cast<std::size_t>(i);
      if (v.shape[n] == 0) last = 0;
      if (last > 0) last += (v.shape[n] - 1) * v.stride[n];
    }
    sum.assign(static_cast<std::size_t>(last), 0.0);
  }
  double& operator[](std::int64_t i) { return sum[static_cast<std::size_t>(i)]; }
  void write(std::int64_t begin, std::int64_t count) {
    for (std::int64_t i = begin; i < begin + count; ++i) store(view.data, view.dtype, i, (*this)[i]);
  }
};

struct Sums {
  Gradient dq, dk, dv;
  std::vector<double> dsink;
};

// d/dx of softcap * tanh(x / softcap), given the capped value.
double cap_slope(double softcap, double capped) {
  if (softcap == 0) return 1.0;
  const double t = capped / softcap;
  return 1.0 - t * t;
}

void backward_row(const Backward& problem, const Doubles& doubles, const Sequence& sequence, std::int64_t i,
                  std::int64_t h, Sums& sums) {
  const std::int64_t d_qk = problem.q.shape[2];
  const std::int64_t d_v = problem.dout.shape[2];
  const std::int64_t h_kv = problem.k.shape[problem.k.rank == 3 ? 1 : 2];
  const std::int64_t kv_head = h / (problem.q.shape[1] / h_kv);
  const std::int64_t row = sequence.q_begin + i;
  const std::int64_t q_at = at(problem.q, row, h);
  const std::int64_t dout_at = at(problem.dout, row, h);
  const double sink = sink_of(problem.sink_logit, doubles, h);
  const std::int64_t lse_at = h * problem.q.shape[0] + row;
  double dlse = 0;
  if (problem.dlse_with_sink != nullptr) dlse = static_cast<double>(problem.dlse_with_sink[lse_at]);
  if (doubles.dlse_with_sink != nullptr) dlse = doubles.dlse_with_sink[lse_at];

  const std::vector<std::int64_t> keys = keys_of(problem.spec.mask, sequence, i);
  std::vector<double> x(keys.size()), dp(keys.size()), p(keys.size());
  double top = sink;
  for (std::size_t n = 0; n < keys.size(); ++n) {
    const std::int64_t k_at = key_at(problem.k, sequence, keys[n], kv_head);
    const std::int64_t v_at = key_at(problem.v, sequence, keys[n], kv_head);
    double dot = 0;
    for (std::int64_t d = 0; d < d_qk; ++d) {
      dot +=
          load(problem.q.data, problem.q.dtype, q_at + d) * load(problem.k.data, problem.k.dtype, k_at + d);
    }
    x[n] = problem.spec.scale * dot;
    if (problem.spec.softcap != 0) x[n] = problem.spec.softcap * std::tanh(x[n] / problem.spec.softcap);
    if (x[n] > top) top = x[n];
    for (std::int64_t d = 0; d < d_v; ++d) {
      dp[n] += load(problem.dout.data, problem.dout.dtype, dout_at + d) *
               load(problem.v.data, problem.v.dtype, v_at + d);
    }
  }
  double sink_probability = 0;
  if (sink == kInf) {
    sink_probability = 1;  // p stays 0
  } else if (top > -kInf) {
    double total = std::exp(sink - top);
    for (std::size_t n = 0; n < keys.size(); ++n) total += p[n] = std::exp(x[n] - top);
    for (double& value : p) value /= total;
    sink_probability = std::exp(sink - top) / total;
  }
  double big_d = -dlse;  // D = rowsum(dO * O) - dlse, with dO . O = sum_j p_j dp_j
  for (std::size_t n = 0; n < keys.size(); ++n) big_d += p[n] * dp[n];

  sums.dsink[static_cast<std::size_t>(h)] -= sink_probability * big_d;
  for (std::size_t n = 0; n < keys.size(); ++n) {
    const double ds = p[n] * (dp[n] - big_d) * cap_slope(problem.spec.softcap, x[n]) * problem.spec.scale;
    const std::int64_t k_at = key_at(problem.k, sequence, keys[n], kv_head);
    const std::int64_t dk_at = key_at(problem.dk, sequence, keys[n], kv_head);
    const std::int64_t dv_at = key_at(problem.dv, sequence, keys[n], kv_head);
    for (std::int64_t d = 0; d < d_qk; ++d) {
      sums.dq[at(problem.dq, row, h) + d] += ds * load(problem.k.data, problem.k.dtype, k_at + d);
      sums.dk[dk_at + d] += ds * load(problem.q.data, problem.q.dtype, q_at + d);
    }
    for (std::int64_t d = 0; d < d_v; ++d) {
      sums.dv[dv_at + d] += p[n] * load(problem.dout.data, problem.dout.dtype, dout_at + d);
    }
  }
}

}  // namespace

void backward(const Backward& problem, const Doubles& doubles) {
  const std::int64_t h_q = problem.q.shape[1];
  const std::int64_t h_kv = problem.k.shape[problem.k.rank == 3 ? 1 : 2];
  Sums sums{Gradient(problem.dq), Gradient(problem.dk), Gradient(problem.dv),
            std::vector<double>(static_cast<std::size_t>(h_q), 0.0)};
  for (const Sequence& sequence : problem.sequences) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      for (std::int64_t h = 0; h < h_q; ++h) backward_row(problem, doubles, sequence, i, h, sums);
    }
  }
  for (const Sequence& sequence : problem.sequences) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      for (std::int64_t h = 0; h < h_q; ++h)
        sums.dq.write(at(problem.dq, sequence.q_begin + i, h), problem.dq.shape[2]);
    }
    for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
      if (sequence.pages != nullptr && sequence.pages[j / problem.k.shape[1]] < 0) continue;
      for (std::int64_t h = 0; h < h_kv; ++h) {
        sums.dk.write(key_at(problem.dk, sequence, j, h), problem.q.shape[2]);
        sums.dv.write(key_at(problem.dv, sequence, j, h), problem.dout.shape[2]);
      }
    }
  }
  for (std::int64_t h = 0; h < h_q; ++h) {
    const double sum = sums.dsink[static_cast<std::size_t>(h)];
    if (problem.dsink_logit != nullptr) problem.dsink_logit[h] = static_cast<float>(sum);
    if (doubles.dsink_logit != nullptr) doubles.dsink_logit[h] = sum;
  }
}

}  // namespace basin::attention::reference
