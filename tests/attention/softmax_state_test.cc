#include "basin/attention/softmax_state.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace basin::attention {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct State {
  PartialState<double> state;
  std::vector<double> acc = {0, 0};

  State() = default;
  State(const State& other) : state(other.state), acc(other.acc) { state.acc = acc.data(); }
  State& operator=(const State&) = delete;
  void add(double score, double v) {
    std::vector<double> value = {v, -2 * v};
    const PartialState<double> one{score, 1.0, value.data()};
    state.acc = acc.data();
    merge(state, one, 2);
  }
  void add(const State& other) {
    state.acc = acc.data();
    merge(state, other.state, 2);
  }
};

struct Key {
  double score, v;
};

State state_of(const std::vector<Key>& keys) {
  State s;
  s.state.acc = s.acc.data();
  for (const Key& key : keys) s.add(key.score, key.v);
  return s;
}

rc::Gen<std::vector<Key>> some_keys() {
  return rc::gen::container<std::vector<Key>>(rc::gen::map(
      rc::gen::pair(rc::gen::inRange(-4000, 4001), rc::gen::inRange(-100, 101)), [](std::pair<int, int> p) {
        return Key{p.first == 4000 ? -kInf : p.first / 10.0, p.second / 10.0};
      }));
}

double output(const State& s, double sink) {
  return finish(s.state, sink).factor * s.acc[0];
}

RC_GTEST_PROP(SoftmaxState, MergeIsSymmetricInBits, ()) {
  const auto a = *some_keys(), b = *some_keys();
  State ab = state_of(a), ba = state_of(b);
  ab.add(state_of(b));
  ba.add(state_of(a));
  RC_ASSERT(ab.state.m == ba.state.m);
  RC_ASSERT(ab.state.l == ba.state.l);
  RC_ASSERT(ab.acc == ba.acc);
}

RC_GTEST_PROP(SoftmaxState, AnySplitAndOrderCountsTheSinkOnce, ()) {
  auto keys = *some_keys();
  const double sink = *rc::gen::inRange(-3000, 3000) / 10.0;
  const auto cuts = *rc::gen::container<std::vector<int>>(keys.size(), rc::gen::inRange(0, 4));
  const State whole = state_of(keys);
  std::vector<std::vector<Key>> parts(4);
  for (std::size_t i = 0; i < keys.size(); ++i) parts[static_cast<std::size_t>(cuts[i])].push_back(keys[i]);
  State left = state_of(parts[3]);  // ((3 + 1) + 0) + 2
  for (const std::size_t n : {1u, 0u, 2u}) left.add(state_of(parts[n]));
  State right = state_of(parts[0]), tail = state_of(parts[2]);  // (0 + 1) + (2 + 3)
  right.add(state_of(parts[1]));
  tail.add(state_of(parts[3]));
  right.add(tail);
  // By definition, with the joint maximum.
  double top = sink, total = 0, sum = 0;
  for (const Key& key : keys) top = std::max(top, key.score);
  total = std::exp(sink - top);
  for (const Key& key : keys) {
    total += std::exp(key.score - top);
    sum += std::exp(key.score - top) * key.v;
  }
  for (const State* s : {&whole, const_cast<const State*>(&left), const_cast<const State*>(&right)}) {
    RC_ASSERT(std::abs(output(*s, sink) - sum / total) < 1e-11);
    RC_ASSERT(std::abs(finish(s->state, sink).lse_with_sink - (top + std::log(total))) < 1e-11);
  }
}

TEST(SoftmaxState, NoKeys) {
  const State none = state_of({});
  for (const double sink : {-kInf, -300.0, 0.0, 300.0, kInf}) {
    const auto end = finish(none.state, sink);
    EXPECT_EQ(end.factor, 0);
    EXPECT_EQ(end.lse, -kInf);
    EXPECT_EQ(end.lse_with_sink, sink);
  }
}

TEST(SoftmaxState, KeysOfMinusInfinityAreNoKeys) {
  State s = state_of({{-kInf, 7.0}, {-kInf, 3.0}});
  EXPECT_EQ(finish(s.state, -kInf).factor * s.acc[0], 0);
  EXPECT_EQ(finish(s.state, -kInf).lse, -kInf);
  s.add(2.0, 5.0);
  EXPECT_EQ(finish(s.state, -kInf).factor * s.acc[0], 5.0);
  s.add(-kInf, 9.0);
  EXPECT_EQ(finish(s.state, -kInf).factor * s.acc[0], 5.0);
}

// A split without keys may leave its accumulator unwritten.
TEST(SoftmaxState, AStateWithoutKeysIsNotRead) {
  State s = state_of({{1.0, 4.0}});
  double nan[2] = {std::nan(""), std::nan("")};
  merge(s.state, PartialState<double>{-kInf, 0.0, nan}, 2);
  EXPECT_EQ(output(s, -kInf), 4.0);
}

// Two keys of score x and sink s: closed form, where exp(s) alone would overflow or vanish.
TEST(SoftmaxState, FiniteSinksAreExact) {
  for (const double x : {-200.0, 0.0, 200.0}) {
    const State s = state_of({{x, 3.0}, {x, 5.0}});
    for (const double sink : {-300.0, -100.0, -30.0, 0.0, 30.0, 100.0, 300.0}) {
      const auto end = finish(s.state, sink);
      const double share = 1 / (2 + std::exp(sink - x));
      EXPECT_NEAR(end.factor * s.acc[0], 8 * share, 1e-14 * 8 * share);
      EXPECT_NEAR(end.lse, x + std::log(2.0), 1e-12);
      const double larger = std::max(end.lse, sink), smaller = std::min(end.lse, sink);
      EXPECT_NEAR(end.lse_with_sink, larger + std::log1p(std::exp(smaller - larger)), 1e-12);
    }
  }
}

TEST(SoftmaxState, InfiniteSinks) {
  const State s = state_of({{1.0, 4.0}});
  EXPECT_EQ(output(s, -kInf), 4.0);
  EXPECT_EQ(finish(s.state, -kInf).lse_with_sink, finish(s.state, -kInf).lse);
  EXPECT_EQ(output(s, kInf), 0.0);
  EXPECT_EQ(finish(s.state, kInf).lse_with_sink, kInf);
  EXPECT_EQ(finish(s.state, kInf).lse, 1.0);
}

// exp(lse) is the sum of exponentials: a base-2 logarithm would be off by ln 2.
TEST(SoftmaxState, TheLogarithmIsNatural) {
  const State s = state_of({{0.5, 0.0}, {1.5, 0.0}});
  EXPECT_NEAR(std::exp(finish(s.state, -kInf).lse), std::exp(0.5) + std::exp(1.5), 1e-14);
}

TEST(SoftmaxState, FloatWorksToo) {
  float acc[1] = {2.0f};
  const PartialState<float> state{88.0f, 1.0f, acc};
  const auto end = finish(state, 300.0f);
  EXPECT_EQ(end.lse_with_sink, 300.0f);
  EXPECT_GE(end.factor, 0.0f);
  EXPECT_LT(end.factor, 1e-37f);
}

}  // namespace
}  // namespace basin::attention
