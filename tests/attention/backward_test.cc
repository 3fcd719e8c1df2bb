// The gradients, against finite differences and closed forms; sizes are absolute, since a wrong factor keeps directions.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "basin/attention/attention.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"

namespace basin::attention {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Tensors in double, and the function whose gradient backward() returns.
struct Model {
  Spec spec;
  std::int64_t h_q, h_kv, d_qk, d_v, page_tokens = 0;
  std::vector<Sequence> sequences;
  std::int64_t total_q = 0, total_kv = 0;
  std::vector<std::vector<std::int32_t>> tables;
  std::vector<double> q, k, v, sink, dout, dlse;

  Model(Spec s, std::int64_t hq, std::int64_t hkv, std::int64_t dqk, std::int64_t dv,
        const std::vector<std::pair<std::int64_t, std::int64_t>>& lengths, std::int64_t pages_of = 0)
      : spec(s), h_q(hq), h_kv(hkv), d_qk(dqk), d_v(dv), page_tokens(pages_of) {
    std::int32_t page = 0;
    tables.reserve(lengths.size());
    for (const auto& [n_q, n_kv] : lengths) {
      sequences.push_back({total_q, n_q, total_kv, n_kv, nullptr});
      total_q += n_q;
      total_kv += n_kv;
      if (page_tokens == 0) continue;
      tables.emplace_back();
      for (std::int64_t j = 0; j < n_kv; j += page_tokens) tables.back().push_back(page++);
      sequences.back().pages = tables.back().data();
    }
    if (page_tokens > 0) total_kv = page * page_tokens;
    std::mt19937_64 random(17);
    std::normal_distribution<double> normal;
    const auto draw = [&](std::vector<double>& to, std::int64_t count) {
      to.resize(index(count));
      for (double& x : to) x = normal(random);
    };
    draw(q, total_q * h_q * d_qk);
    draw(k, total_kv * h_kv * d_qk);
    draw(v, total_kv * h_kv * d_v);
    draw(sink, h_q);
    draw(dout, total_q * h_q * d_v);
    draw(dlse, h_q * total_q);
  }

  template <typename Pointer>
  BasicView<Pointer> keys(Pointer data, std::int64_t d) const {
    if (page_tokens > 0) return contiguous(data, DType::f64, {total_kv / page_tokens, page_tokens, h_kv, d});
    return contiguous(data, DType::f64, {total_kv, h_kv, d});
  }

  double loss() const {
    std::vector<double> out(index(total_q * h_q * d_v)), lse(index(h_q * total_q));
    Forward f;
    f.spec = spec;
    f.sequences = sequences;
    f.q = contiguous<const void*>(q.data(), DType::f64, {total_q, h_q, d_qk});
    f.k = keys<const void*>(k.data(), d_qk);
    f.v = keys<const void*>(v.data(), d_v);
    f.out = contiguous<void*>(out.data(), DType::f64, {total_q, h_q, d_v});
    check(f);
    reference::Doubles doubles;
    doubles.sink_logit = sink.empty() ? nullptr : sink.data();
    doubles.lse_with_sink = lse.data();
    reference::forward(f, reference::Precision::f64, doubles);
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
    for (std::size_t i = 0; i < dlse.size(); ++i) {
      if (dlse[i] != 0) sum += lse[i] * dlse[i];
    }
    return sum;
  }

  struct Gradients {
    std::vector<double> q, k, v, sink;
  };
  Gradients gradients() const {
    const double nan = std::numeric_limits<double>::quiet_NaN();  // a row that is not written shows
    Gradients g{std::vector<double>(q.size(), nan), std::vector<double>(k.size(), nan),
                std::vector<double>(v.size(), nan), std::vector<double>(sink.size(), nan)};
    Backward b;
    b.spec = spec;
    b.sequences = sequences;
    b.q = contiguous<const void*>(q.data(), DType::f64, {total_q, h_q, d_qk});
    b.k = keys<const void*>(k.data(), d_qk);
    b.v = keys<const void*>(v.data(), d_v);
    b.dout = contiguous<const void*>(dout.data(), DType::f64, {total_q, h_q, d_v});
    b.dq = contiguous<void*>(g.q.data(), DType::f64, {total_q, h_q, d_qk});
    b.dk = keys<void*>(g.k.data(), d_qk);
    b.dv = keys<void*>(g.v.data(), d_v);
    check(b);
    reference::Doubles doubles;
    doubles.sink_logit = sink.empty() ? nullptr : sink.data();
    doubles.dsink_logit = sink.empty() ? nullptr : g.sink.data();
    doubles.dlse_with_sink = dlse.empty() ? nullptr : dlse.data();
    reference::backward(b, doubles);
    return g;
  }
};

// Central differences of every stride-th element. Rows that no sequence owns keep NaN and are left out.
void expect_gradient(Model& model, std::vector<double>& x, const std::vector<double>& gradient,
                     const char* what, std::size_t stride = 1) {
  for (std::size_t i = 0; i < x.size(); i += stride) {
    if (std::isnan(gradient[i])) continue;
    const double keep = x[i], step = 1e-5;
    x[i] = keep + step;
    const double up = model.loss();
    x[i] = keep - step;
    const double down = model.loss();
    x[i] = keep;
    ASSERT_NEAR(gradient[i], (up - down) / (2 * step), 2e-8) << what << ' ' << i;
  }
}

void expect_gradients(Model model) {
  const auto g = model.gradients();
  expect_gradient(model, model.q, g.q, "q", 3);
  expect_gradient(model, model.k, g.k, "k", 3);
  expect_gradient(model, model.v, g.v, "v", 3);
  expect_gradient(model, model.sink, g.sink, "sink");
}

Spec spec_of(Mask mask, double softcap = 0) {
  return {mask, 0.4, softcap};
}

TEST(AttentionBackward, FiniteDifferencesCausalGroupedRagged) {
  expect_gradients(Model(spec_of({}), 4, 2, 5, 3, {{4, 6}, {1, 1}, {3, 2}, {0, 2}}));
}

TEST(AttentionBackward, FiniteDifferencesAsymmetricWindow) {
  expect_gradients(Model(spec_of({.causal = false, .window = 3, .window_right = 1, .sink_tokens = 1}), 2, 1,
                         4, 4, {{9, 9}}));
}

TEST(AttentionBackward, FiniteDifferencesSinkTokensAndSoftcap) {
  expect_gradients(
      Model(spec_of({.causal = true, .window = 2, .sink_tokens = 2}, 1.5), 2, 2, 4, 6, {{7, 8}}));
}

TEST(AttentionBackward, FiniteDifferencesPaged) {
  expect_gradients(Model(spec_of({.causal = true, .window = 4}), 2, 1, 4, 4, {{5, 7}, {2, 3}}, 2));
}

TEST(AttentionBackward, FiniteDifferencesWithoutSink) {
  Model model(spec_of({}), 2, 1, 4, 4, {{4, 5}});
  model.sink.clear();
  expect_gradients(model);
}

TEST(AttentionBackward, TheLseAloneReachesSinkQueriesAndKeys) {
  Model model(spec_of({}), 2, 1, 4, 4, {{3, 5}});
  model.dout.assign(model.dout.size(), 0.0);
  const auto g = model.gradients();
  const auto size = [](const std::vector<double>& x) {
    double sum = 0;
    for (const double value : x) sum += std::abs(value);
    return sum;
  };
  EXPECT_GT(size(g.q), 0.05);
  EXPECT_GT(size(g.k), 0.05);
  EXPECT_GT(size(g.sink), 0.05);
  EXPECT_EQ(size(g.v), 0.0);
  expect_gradients(model);
}

// One query, one key, q = k = 1, v = 2, sink = 0, scale 1: p = e / (1 + e), O = 2 p; dq = dk = 2 p (1 - p), dsink = -that.
// sigmoid(lse - sink) behind a kernel whose lse is not differentiable gives dq = dk = 0 here.
TEST(AttentionBackward, OneKeyOfTorchtitan4796) {
  Spec spec;
  spec.scale = 1;
  Model model(spec, 1, 1, 1, 1, {{1, 1}});
  model.q = model.k = {1.0};
  model.v = {2.0};
  model.sink = {0.0};
  model.dout = {1.0};
  model.dlse.clear();
  const auto g = model.gradients();
  EXPECT_NEAR(g.q[0], 0.39322387, 5e-9);
  EXPECT_NEAR(g.k[0], 0.39322387, 5e-9);
  EXPECT_NEAR(g.sink[0], -0.39322387, 5e-9);
  EXPECT_NEAR(g.v[0], 0.73105858, 5e-9);
}

TEST(AttentionBackward, EmptyRowsHandTheLseGradientToTheSink) {
  Model model(spec_of({}), 2, 1, 4, 4, {{3, 0}, {4, 2}});
  for (const double sink : {0.5, -300.0, 300.0}) {
    model.sink = {sink, sink};
    model.dout.assign(model.dout.size(), 3.0);
    model.dlse.assign(model.dlse.size(), 0.0);
    for (std::int64_t row : {0, 1, 2, 3, 4}) model.dlse[index(row)] = 0.25;  // head 0: five rows without keys
    const auto g = model.gradients();
    Model bare = model;
    bare.dlse.assign(bare.dlse.size(), 0.0);
    EXPECT_NEAR(g.sink[0] - bare.gradients().sink[0], 5 * 0.25, 1e-12);
    EXPECT_EQ(g.sink[1], bare.gradients().sink[1]);
    for (std::int64_t i = 0; i < 5 * 2 * 4; ++i) EXPECT_EQ(g.q[index(i)], 0.0);
  }
}

TEST(AttentionBackward, ExtremeSinksGiveFiniteGradients) {
  for (const double sink : {-kInf, -300.0, -30.0, 30.0, 300.0, kInf}) {
    Model model(spec_of({}), 2, 1, 4, 4, {{3, 5}});
    model.sink = {sink, 0.0};
    if (std::isinf(sink)) model.dlse.clear();
    const auto g = model.gradients();
    for (const auto* x : {&g.q, &g.k, &g.v, &g.sink}) {
      for (const double value : *x) ASSERT_TRUE(std::isfinite(value)) << sink;
    }
    EXPECT_TRUE(!std::isinf(sink) || g.sink[0] == 0.0);  // no share of anything, or O = 0 whatever it is
  }
}

TEST(AttentionBackward, TwoEqualSequencesDoubleTheSinkGradient) {
  Model one(spec_of({}), 2, 1, 4, 4, {{3, 5}});
  Model two(spec_of({}), 2, 1, 4, 4, {{3, 5}, {3, 5}});
  const auto twice = [](const std::vector<double>& x) {
    std::vector<double> y = x;
    y.insert(y.end(), x.begin(), x.end());
    return y;
  };
  two.q = twice(one.q);
  two.k = twice(one.k);
  two.v = twice(one.v);
  two.dout = twice(one.dout);
  two.sink = one.sink;
  one.dlse.clear();
  two.dlse.clear();
  const auto a = one.gradients(), b = two.gradients();
  for (std::size_t h = 0; h < 2; ++h) EXPECT_NEAR(b.sink[h], 2 * a.sink[h], 1e-13);
  EXPECT_EQ(b.q, twice(a.q));
  EXPECT_EQ(b.k, twice(a.k));
}

TEST(AttentionBackward, TheFloatFieldsWorkThroughTheFrontDoor) {
  Model model(spec_of({.causal = true, .window = 3}), 2, 1, 4, 4, {{5, 6}});
  for (double& s : model.sink) s = static_cast<double>(static_cast<float>(s));
  for (double& x : model.dlse) x = static_cast<double>(static_cast<float>(x));
  const auto want = model.gradients();
  const std::vector<float> sink(model.sink.begin(), model.sink.end()),
      dlse(model.dlse.begin(), model.dlse.end());
  std::vector<float> dsink(2, -1.0f);
  std::vector<double> dq(model.q.size()), dk(model.k.size()), dv(model.v.size());
  Backward b;
  b.spec = model.spec;
  b.sequences = model.sequences;
  b.q = contiguous<const void*>(model.q.data(), DType::f64, {5, 2, 4});
  b.k = contiguous<const void*>(model.k.data(), DType::f64, {6, 1, 4});
  b.v = contiguous<const void*>(model.v.data(), DType::f64, {6, 1, 4});
  b.dout = contiguous<const void*>(model.dout.data(), DType::f64, {5, 2, 4});
  b.dq = contiguous<void*>(dq.data(), DType::f64, {5, 2, 4});
  b.dk = contiguous<void*>(dk.data(), DType::f64, {6, 1, 4});
  b.dv = contiguous<void*>(dv.data(), DType::f64, {6, 1, 4});
  b.sink_logit = sink.data();
  b.dsink_logit = dsink.data();
  b.dlse_with_sink = dlse.data();
  ThreadPool pool(1);
  for (int round = 0; round < 2; ++round) {  // gradients are written, not added to
    EXPECT_EQ(backward(b, Backend::automatic, pool).backend, "reference");
    EXPECT_EQ(dq, want.q);
    EXPECT_EQ(dk, want.k);
    EXPECT_EQ(dv, want.v);
    for (std::size_t h = 0; h < 2; ++h) EXPECT_EQ(dsink[h], static_cast<float>(want.sink[h]));
  }
}

}  // namespace
}  // namespace basin::attention
