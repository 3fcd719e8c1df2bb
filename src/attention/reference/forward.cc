#include <limits>
#include <set>

#include "attention/reference/rows.h"
#include "basin/attention/reference.h"

namespace basin::attention::reference {
namespace {

// The keys that query i sees, ascending.
std::vector<std::int64_t> selected_keys(const Mask& mask, const Selection& selection,
                                        const Sequence& sequence, std::int64_t i) {
  std::vector<std::int64_t> keys = keys_of(mask, sequence, i);
  if (selection.indices == nullptr) return keys;
  const std::int64_t row = sequence.q_begin + i;
  const std::int32_t* begin = selection.indices + row * selection.topk;
  const std::int32_t* end = begin + (selection.lengths != nullptr ? selection.lengths[row] : selection.topk);
  const std::set<std::int64_t> selected(begin, end);
  std::erase_if(keys, [&](std::int64_t key) { return !selected.contains(key); });
  return keys;
}

// One row (query i of a sequence, query head h) over `keys`. Real is the type every operation is rounded to.
template <typename Real>
void forward_row(const Forward& problem, const Doubles& doubles, const Sequence& sequence, std::int64_t i,
                 std::int64_t h, const std::vector<std::int64_t>& keys, bool round_p) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  const std::int64_t d_qk = problem.q.shape[2];
  const std::int64_t d_v = problem.out.shape[2];
  const std::int64_t h_kv = problem.k.shape[problem.k.rank == 3 ? 1 : 2];
  const std::int64_t kv_head = h / (problem.q.shape[1] / h_kv);
  const std::int64_t row = sequence.q_begin + i;
  const Real scale = static_cast<Real>(problem.spec.scale);
  const Real softcap = static_cast<Real>(problem.spec.softcap);

  std::vector<Real> x(keys.size());
  Real m = -kInf;
  for (std::size_t n = 0; n < keys.size(); ++n) {
    const ConstView& q =
        problem.q_sink && keys[n] < problem.spec.mask.sink_tokens ? problem.q_sink : problem.q;
    const std::int64_t q_at = at(q, row, h);
    const std::int64_t k_at = key_at(problem.k, sequence, keys[n], kv_head);
    Real dot = 0;
    for (std::int64_t d = 0; d < d_qk; ++d) {
      dot += static_cast<Real>(load(q.data, q.dtype, q_at + d)) *
             static_cast<Real>(load(problem.k.data, problem.k.dtype, k_at + d));
    }
    x[n] = scale * dot;
    if (softcap != 0) x[n] = softcap * std::tanh(x[n] / softcap);
    if (x[n] > m) m = x[n];
  }
  const Real sink = static_cast<Real>(sink_of(problem.sink_logit, doubles, h));
  const Real top = sink > m ? sink : m;

  // With top = +inf the sink (or a score) takes everything; with -inf nothing is there at all.
  Real keys_sum = 0;
  Real key_only_sum = 0;  // relative to m, for the sink-free lse
  std::vector<Real> acc(static_cast<std::size_t>(d_v), Real{0});
  for (std::size_t n = 0; n < keys.size(); ++n) {
    if (x[n] == -kInf) continue;
    key_only_sum += std::exp(x[n] - m);
    const Real e = sink == kInf ? Real{0} : std::exp(x[n] - top);
    keys_sum += e;
    const Real weight = round_p ? static_cast<Real>(rounded(problem.v.dtype, static_cast<double>(e))) : e;
    const std::int64_t v_at = key_at(problem.v, sequence, keys[n], kv_head);
    for (std::int64_t d = 0; d < d_v; ++d) {
      acc[static_cast<std::size_t>(d)] +=
          weight * static_cast<Real>(load(problem.v.data, problem.v.dtype, v_at + d));
    }
  }
  const Real sink_weight = sink == kInf ? Real{1} : (sink == -kInf ? Real{0} : std::exp(sink - top));
  const Real total = keys_sum + sink_weight;
  const std::int64_t out_at = at(problem.out, row, h);
  for (std::int64_t d = 0; d < d_v; ++d) {
    const Real o = total > 0 ? acc[static_cast<std::size_t>(d)] / total : Real{0};
    store(problem.out.data, problem.out.dtype, out_at + d, static_cast<double>(o));
  }
  const std::int64_t lse_at = h * problem.q.shape[0] + row;
  const Real lse = key_only_sum > 0 ? m + std::log(key_only_sum) : -kInf;
  const Real lse_with_sink = sink == kInf ? kInf : (total > 0 ? top + std::log(total) : -kInf);
  if (problem.lse != nullptr) problem.lse[lse_at] = static_cast<float>(lse);
  if (problem.lse_with_sink != nullptr) problem.lse_with_sink[lse_at] = static_cast<float>(lse_with_sink);
  if (doubles.lse != nullptr) doubles.lse[lse_at] = static_cast<double>(lse);
  if (doubles.lse_with_sink != nullptr) doubles.lse_with_sink[lse_at] = static_cast<double>(lse_with_sink);
}

}  // namespace

void forward(const Forward& problem, Precision precision, const Doubles& doubles) {
  forward(problem, Selection{}, precision, doubles);
}

void forward(const Forward& problem, const Selection& selection, Precision precision,
             const Doubles& doubles) {
  for (const Sequence& sequence : problem.sequences) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      const std::vector<std::int64_t> keys = selected_keys(problem.spec.mask, selection, sequence, i);
      for (std::int64_t h = 0; h < problem.q.shape[1]; ++h) {
        if (precision == Precision::f64) {
          forward_row<double>(problem, doubles, sequence, i, h, keys, false);
        } else {
          forward_row<float>(problem, doubles, sequence, i, h, keys, precision == Precision::storage);
        }
      }
    }
  }
}

}  // namespace basin::attention::reference
