// The example of docs/sinks.md through the library: one query, two keys, a sink logit. Exits 1 if it is not so.
#include <cmath>
#include <iomanip>
#include <iostream>
#include <vector>

#include "basin/attention/attention.h"
#include "basin/base/error.h"
#include "basin/tensor/view.h"

int main() {
  constexpr int d = 16;  // head size; only the first two numbers are used
  std::vector<float> q(d), k(2 * d), v(2 * d), out(d);
  q[0] = 1.0F;
  k[0] = std::log(2.0F);  // score of key 0: ln 2; of key 1: 0
  v[0] = 1.0F;            // v_0 = (1, 0, ...)
  v[d + 1] = 1.0F;        // v_1 = (0, 1, ...)
  const float sink_logit = 0.0F;
  float lse = 0.0F, lse_with_sink = 0.0F;

  const basin::attention::Sequence sequence{.q_tokens = 1, .kv_tokens = 2};
  basin::attention::Forward problem;
  problem.spec.scale = 1.0;
  problem.sequences = {&sequence, 1};
  problem.q = basin::contiguous<const void*>(q.data(), basin::DType::f32, {1, 1, d});
  problem.k = basin::contiguous<const void*>(k.data(), basin::DType::f32, {2, 1, d});
  problem.v = basin::contiguous<const void*>(v.data(), basin::DType::f32, {2, 1, d});
  problem.out = basin::contiguous<void*>(out.data(), basin::DType::f32, {1, 1, d});
  problem.sink_logit = &sink_logit;
  problem.lse = &lse;
  problem.lse_with_sink = &lse_with_sink;

  try {
    basin::ThreadPool pool(1);
    const auto ran = basin::attention::forward(problem, basin::attention::Backend::automatic, pool);
    std::cout << "ran on " << ran.backend << " (" << ran.target << ")\n";
  } catch (const basin::Error& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  std::cout << std::fixed << std::setprecision(4) << "O = (" << out[0] << ", " << out[1] << ")  lse = " << lse
            << "  lse_with_sink = " << lse_with_sink << '\n';
  const auto near = [](float value, double expected) { return std::abs(value - expected) < 1e-6; };
  const bool as_by_hand = near(out[0], 0.5) && near(out[1], 0.25) && near(lse, std::log(3.0)) &&
                          near(lse_with_sink, std::log(4.0));
  return as_by_hand ? 0 : 1;
}
