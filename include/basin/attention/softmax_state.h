// Partial softmax states. A partial state never contains the sink: `merge` knows nothing of sinks and `finish`, called
// once per row, adds it. So the sink counts exactly once, however the keys were split.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace basin::attention {

/// Sum over some keys: l = sum exp(x_j - m), acc = sum exp(x_j - m) v_j. No key yet: m = -inf, l = 0, acc = 0.
/// A key whose score is -inf has no weight, so it is no key. Scores, m and every lse are in natural units.
template <typename Real>
struct PartialState {
  Real m = -std::numeric_limits<Real>::infinity();  // maximum score, natural units
  Real l = 0;
  Real* acc = nullptr;  // [d_v], not null
};

/// into += from, the same bits whichever side is which. Merging with a state without keys is exact. acc has d_v
/// elements.
template <typename Real>
void merge(PartialState<Real>& into, const PartialState<Real>& from, std::int64_t d_v) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  if (from.m == -kInf) return;  // else (-inf) - (-inf) below
  if (into.m == -kInf) {
    into.m = from.m;
    into.l = from.l;
    for (std::int64_t d = 0; d < d_v; ++d) into.acc[d] = from.acc[d];
    return;
  }
  const Real m = into.m > from.m ? into.m : from.m;
  const Real a = std::exp(into.m - m);
  const Real b = std::exp(from.m - m);
  into.m = m;
  into.l = into.l * a + from.l * b;  // no fma: the sum must not depend on which side is which
  for (std::int64_t d = 0; d < d_v; ++d) into.acc[d] = into.acc[d] * a + from.acc[d] * b;
}

/// The end of a row.
template <typename Real>
struct Finished {
  Real factor;         // O = factor * acc
  Real lse;            // natural log over the keys; -inf without keys
  Real lse_with_sink;  // logaddexp(lse, sink_logit)
};

/// `sink_logit` in natural units; -inf = no sink, +inf gives O = 0. Large finite sinks are exact: joint maximum.
template <typename Real>
Finished<Real> finish(const PartialState<Real>& state, Real sink_logit) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  if (state.m == -kInf) return {Real{0}, -kInf, sink_logit};
  const Real lse = state.m + std::log(state.l);
  if (sink_logit == -kInf) return {Real{1} / state.l, lse, lse};
  if (sink_logit == kInf) return {Real{0}, lse, kInf};
  const Real top = sink_logit > state.m ? sink_logit : state.m;
  const Real weight = std::exp(state.m - top);
  const Real total = std::fma(state.l, weight, std::exp(sink_logit - top));
  return {weight / total, lse, top + std::log(total)};
}

}  // namespace basin::attention
