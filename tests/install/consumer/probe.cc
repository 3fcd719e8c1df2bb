// q = 0 and v = 1: every visible key weighs the same, so with a sink logit of 0 over n keys the output is n / (n + 1).
// Prints the target that ran.
#include <basin/attention/attention.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

int main() try {
  constexpr std::int64_t kTokens = 3000, d = 64;
  const std::vector<float> q(kTokens * d, 0.0F), k(kTokens * d, 1.0F), v(kTokens * d, 1.0F);
  std::vector<float> out(kTokens * d, -1.0F), lse(kTokens);
  const float sink_logit = 0.0F;
  const basin::attention::Sequence sequence{.q_tokens = kTokens, .kv_tokens = kTokens};
  basin::attention::Forward problem;
  problem.spec.scale = 0.125;
  problem.spec.mask.window = 1020;
  problem.spec.mask.sink_tokens = 4;
  problem.sequences = {&sequence, 1};
  problem.q = basin::contiguous<const void*>(q.data(), basin::DType::f32, {kTokens, 1, d});
  problem.k = basin::contiguous<const void*>(k.data(), basin::DType::f32, {kTokens, 1, d});
  problem.v = basin::contiguous<const void*>(v.data(), basin::DType::f32, {kTokens, 1, d});
  problem.out = basin::contiguous<void*>(out.data(), basin::DType::f32, {kTokens, 1, d});
  problem.sink_logit = &sink_logit;
  problem.lse = lse.data();
  basin::ThreadPool pool(2);
  const auto ran = basin::attention::forward(problem, basin::attention::Backend::cpu, pool);
  for (std::int64_t i = 0; i < kTokens; ++i) {
    const double n = static_cast<double>(i + 1 < 1024 ? i + 1 : 1024);
    const auto row = static_cast<std::size_t>(i);
    for (std::size_t c = row * d; c < (row + 1) * d; ++c) {
      if (std::abs(static_cast<double>(out[c]) - n / (n + 1)) > 1e-6) return 1;
    }
    if (std::abs(static_cast<double>(lse[row]) - std::log(n)) > 1e-6) return 1;
  }
  std::printf("%.*s\n", static_cast<int>(ran.target.size()), ran.target.data());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
