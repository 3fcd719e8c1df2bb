// What every backend must do, through the front door. Cases are (backend, dtype).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "attention/problem.h"
#include "basin/attention/support.h"

namespace basin::test {
namespace {

using attention::Backend;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Way {
  Backend backend;
  DType dtype;
};

class AttentionForward : public testing::TestWithParam<Way> {
 protected:
  Layout layout(std::int64_t page_tokens = 0, bool hostile = false) const {
    return {GetParam().dtype, GetParam().dtype == DType::f64 ? DType::f64 : DType::f32, page_tokens, hostile};
  }
  Output run(const Problem& problem, std::int64_t page_tokens = 0, bool hostile = false) const {
    return test::run(problem, layout(page_tokens, hostile), GetParam().backend);
  }
  // Rounding of scores and probabilities, for values of size 1.
  double tolerance() const {
    switch (GetParam().dtype) {
      case DType::f64:
        return 1e-6;  // lse is a float
      case DType::f32:
        return 5e-6;
      case DType::f16:
        return 2e-3;
      default:
        return 2e-2;
    }
  }
};

// Everything at once, small.
Problem everything() {
  Problem p;
  p.h_q = 6;
  p.h_kv = 2;
  p.d_qk = 32;
  p.d_v = 48;
  p.lengths = {{5, 70}, {0, 9}, {1, 0}, {1, 1}, {33, 33}, {7, 3}, {1, 200}};
  p.spec.mask = {.causal = true, .window = 20, .sink_tokens = 3};
  p.spec.softcap = 8;
  fill(p, {.seed = 3, .sink_logit = true, .q_sink = true});
  return p;
}

TEST_P(AttentionForward, EqualScoresGiveTheClosedForm) {
  for (const std::int64_t queries : {1, 5}) {
    Problem p;
    p.h_q = 4;
    p.h_kv = 2;
    p.lengths = {{queries, 40}, {queries, 7}};
    fill(p);
    p.q.assign(p.q.size(), 0.0);
    p.v.assign(p.v.size(), 1.0);
    p.sink_logit = {2.0f, 0.0f, -1.0f, 3.5f};  // differs by head
    const Output got = run(p);
    std::size_t at = 0;
    for (const Lengths& length : p.lengths) {
      for (std::int64_t i = 0; i < length.q; ++i) {
        const auto n = static_cast<double>(length.kv - length.q + i + 1);
        for (std::size_t h = 0; h < 4; ++h) {
          const double want = n / (n + std::exp(static_cast<double>(p.sink_logit[h])));
          for (std::int64_t d = 0; d < p.d_v; ++d) ASSERT_NEAR(got.out[at++], want, tolerance() * 0.2);
        }
      }
    }
  }
}

TEST_P(AttentionForward, EverythingAtOnceEqualsTheReference) {
  const Problem p = everything();
  const Output want = run_reference(p, layout());
  const double yardstick = max_difference(run_reference(p, layout(), true).out, want.out);
  const Output got = run(p);
  EXPECT_LE(max_difference(got.out, want.out), 2 * yardstick + tolerance() * 0.1);
  EXPECT_LE(max_difference(got.lse, want.lse), tolerance());
  EXPECT_LE(max_difference(got.lse_with_sink, want.lse_with_sink), tolerance());
}

// NaN in unused pages, in keys that no query sees, in gaps and padding; sentinels round the outputs (Stored::output).
TEST_P(AttentionForward, HostileBytesAndPagesChangeNoBit) {
  const Problem p = everything();
  const Output plain = run(p);
  for (const std::int64_t page_tokens : {0, 1, 7, 16, 64, 256}) {
    const Output got = run(p, page_tokens, true);
    EXPECT_EQ(got.out, plain.out) << page_tokens;
    EXPECT_EQ(got.lse, plain.lse) << page_tokens;
    EXPECT_EQ(got.lse_with_sink, plain.lse_with_sink) << page_tokens;
  }
}

TEST_P(AttentionForward, EveryOptionChangesTheOutput) {
  Problem base;
  base.h_q = 4;
  base.h_kv = 2;
  base.lengths = {{6, 64}};
  base.spec.mask = {.causal = true, .window = 16, .window_right = -1, .sink_tokens = 2};
  base.spec.softcap = 3;
  fill(base, {.seed = 5, .sink_logit = true, .q_sink = true});
  const Output first = run(base);
  const auto expect_change = [&](const char* what, auto&& change) {
    Problem p = base;
    change(p);
    const Output got = run(p);
    EXPECT_GT(max_difference(got.out, first.out), 1e-3) << what;
    EXPECT_LE(max_difference(got.out, run_reference(p, layout()).out), 4 * tolerance()) << what;
  };
  expect_change("scale", [](Problem& p) { p.spec.scale *= 1.5; });
  expect_change("softcap", [](Problem& p) { p.spec.softcap = 0; });
  expect_change("sink_logit", [](Problem& p) { p.sink_logit.clear(); });
  expect_change("q_sink", [](Problem& p) { p.q_sink.clear(); });
  expect_change("sink_tokens", [](Problem& p) { p.spec.mask.sink_tokens = 0; });
  expect_change("window", [](Problem& p) { p.spec.mask.window = 15; });
  expect_change("no window", [](Problem& p) { p.spec.mask.window = 0; });
  expect_change("causal", [](Problem& p) { p.spec.mask.causal = false; });
  expect_change("window_right", [](Problem& p) {
    p.spec.mask.causal = false;
    p.spec.mask.window_right = 1;
  });
  // Per head: another sink logit changes its own head only.
  Problem p = base;
  p.sink_logit[2] += 1.0f;
  const Output got = run(p);
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    const std::size_t head = i / static_cast<std::size_t>(p.d_v) % 4;
    if (head == 2) continue;
    ASSERT_EQ(got.out[i], first.out[i]);
  }
}

TEST_P(AttentionForward, SinkLogitsOfAnySize) {
  Problem p;
  p.h_q = 9;
  p.h_kv = 1;
  p.lengths = {{4, 50}, {2, 1}};
  fill(p, {.seed = 7});
  p.sink_logit = {-kInf, -300, -100, -30, 0, 30, 100, 300, kInf};
  const Output got = run(p), want = run_reference(p, layout());
  EXPECT_LE(max_difference(got.out, want.out), 4 * tolerance());
  for (std::size_t i = 0; i < got.lse_with_sink.size(); ++i) {
    EXPECT_TRUE(got.lse_with_sink[i] == want.lse_with_sink[i] ||
                std::abs(got.lse_with_sink[i] - want.lse_with_sink[i]) <= tolerance() + 3e-5)
        << i;
  }
  Problem without = p;
  without.sink_logit.clear();
  const Output none = run(without);
  const auto d = static_cast<std::size_t>(p.d_v);
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    const std::size_t head = i / d % 9;
    if (head == 0) {  // -inf equals no sink, in bits
      EXPECT_EQ(got.out[i], none.out[i]);
    } else if (head == 8) {  // +inf takes everything
      EXPECT_EQ(got.out[i], 0.0);
    }
  }
}

TEST_P(AttentionForward, EmptyRows) {
  for (const bool with_sink : {true, false}) {
    Problem p;
    p.lengths = {{5, 2}, {3, 0}};
    fill(p, {.seed = 9, .sink_logit = with_sink});
    const Output got = run(p, 16, true), want = run_reference(p, layout());
    EXPECT_LE(max_difference(got.out, want.out), 4 * tolerance());
    EXPECT_LE(max_difference(got.lse_with_sink, want.lse_with_sink), tolerance());
    const auto rows = static_cast<std::size_t>(p.total_q());
    for (std::size_t h = 0; h < 2; ++h) {
      for (const std::size_t row :
           {0u, 1u, 2u, 5u, 6u, 7u}) {  // three rows before key 0, and a sequence without keys
        EXPECT_EQ(got.lse[h * rows + row], -kInf);
        EXPECT_EQ(got.lse_with_sink[h * rows + row], with_sink ? p.sink_logit[h] : -kInf);
        for (std::size_t d = 0; d < 16; ++d) EXPECT_EQ(got.out[(row * 2 + h) * 16 + d], 0.0);
      }
      EXPECT_GT(got.lse[h * rows + 3], -kInf);
    }
  }
}

// A window smaller than any tile, over more keys than a segment: most tiles show a row nothing.
TEST_P(AttentionForward, ShortWindowsOverLongSequences) {
  for (const std::int64_t window : {1, 3, 17}) {
    Problem p;
    p.h_q = 2;
    p.h_kv = 1;
    p.lengths = {{40, 2100}};
    p.spec.mask = {.causal = true, .window = window, .sink_tokens = 1};
    fill(p, {.seed = 11});
    const Output got = run(p, 16, true), want = run_reference(p, layout());
    EXPECT_LE(max_difference(got.out, want.out), 4 * tolerance()) << window;
    EXPECT_LE(max_difference(got.lse, want.lse), tolerance()) << window;
  }
}

// The lse is natural: two keys of known scores.
TEST_P(AttentionForward, TheLseIsNatural) {
  Problem p;
  p.h_q = 1;
  p.lengths = {{1, 2}};
  fill(p, {.sink_logit = false});
  p.spec.scale = 1;
  p.q.assign(16, 0.0);
  p.k.assign(32, 0.0);
  p.q[0] = 1;
  p.k[0] = 0.5;
  p.k[16] = 1.5;
  const Output got = run(p);
  EXPECT_NEAR(std::exp(static_cast<double>(got.lse[0])), std::exp(0.5) + std::exp(1.5), 1e-5);
  EXPECT_EQ(got.lse, got.lse_with_sink);
}

TEST_P(AttentionForward, ThreadsAndRepetitionChangeNoBit) {
  const Problem p = everything();
  const Output once = test::run(p, layout(), GetParam().backend, 1);
  for (const int threads : {2, 3, 5}) {
    const Output again = test::run(p, layout(), GetParam().backend, threads);
    EXPECT_EQ(again.out, once.out);
    EXPECT_EQ(again.lse_with_sink, once.lse_with_sink);
  }
}

std::string way_name(const testing::TestParamInfo<Way>& tested) {
  return std::string(tested.param.backend == Backend::cpu ? "cpu_" : "reference_") +
         std::string(name(tested.param.dtype));
}

INSTANTIATE_TEST_SUITE_P(Ways, AttentionForward,
                         testing::Values(Way{Backend::reference, DType::f64},
                                         Way{Backend::reference, DType::f32},
                                         Way{Backend::reference, DType::bf16}, Way{Backend::cpu, DType::f32},
                                         Way{Backend::cpu, DType::f16}, Way{Backend::cpu, DType::bf16}),
                         way_name);

TEST(AttentionDispatch, AutomaticTakesTheCpuWhereItCanAndSaysSo) {
  Problem p;
  p.lengths = {{2, 4}};
  fill(p);
  ThreadPool pool(1);
  const Stored floats(p, {.dtype = DType::f32});
  EXPECT_EQ(attention::forward(floats.forward, Backend::automatic, pool).backend, "cpu");
  const Stored doubles(p, {.dtype = DType::f64, .out_dtype = DType::f64});
  EXPECT_EQ(attention::forward(doubles.forward, Backend::automatic, pool).backend, "reference");
  EXPECT_EQ(attention::forward(doubles.forward, Backend::automatic, pool).target, "double");
  EXPECT_EQ(attention::forward(floats.forward, Backend::reference, pool).backend, "reference");
}

}  // namespace
}  // namespace basin::test
