#include "ops/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

RopeConfig config(RopeType type, std::int64_t dim = 32, double theta = 10000.0) {
  RopeConfig c;
  c.type = type;
  c.rotary_dim = dim;
  c.theta = theta;
  c.factor = type == RopeType::standard ? 1.0 : 8.0;
  c.original_context = 64;
  return c;
}

TEST(RopeFrequencies, Standard) {
  const Rope rope(config(RopeType::standard, 64, 100000.0), RopeLayout::half);
  ASSERT_EQ(rope.frequencies().size(), 32u);
  EXPECT_EQ(rope.frequencies()[0], 1.0);
  EXPECT_NEAR(rope.frequencies()[31], std::pow(100000.0, -62.0 / 64), 1e-18);
  EXPECT_EQ(rope.attention_factor(), 1.0);
}

TEST(RopeFrequencies, LinearDividesAll) {
  const Rope plain(config(RopeType::standard), RopeLayout::half),
      scaled(config(RopeType::linear), RopeLayout::half);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_DOUBLE_EQ(scaled.frequencies()[i] * 8, plain.frequencies()[i]);
}

TEST(RopeFrequencies, Llama3KeepsShortWavesAndStretchesLongOnes) {
  const Rope plain(config(RopeType::standard, 32, 500000.0), RopeLayout::half);
  const Rope scaled(config(RopeType::llama3, 32, 500000.0), RopeLayout::half);
  EXPECT_EQ(scaled.frequencies()[0], plain.frequencies()[0]);  // wavelength 6.3 < 64 / 4
  EXPECT_DOUBLE_EQ(scaled.frequencies()[15] * 8, plain.frequencies()[15]);
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_LE(scaled.frequencies()[i], plain.frequencies()[i]);
    EXPECT_GE(scaled.frequencies()[i] * 8, plain.frequencies()[i] * (1 - 1e-15));
  }
}

TEST(RopeFrequencies, YarnTruncatesOnlyWhenAsked) {
  RopeConfig c = config(RopeType::yarn, 32, 150000.0);
  const Rope truncated(c, RopeLayout::half);
  c.truncate = false;
  const Rope exact(c, RopeLayout::half);
  bool differ = false;
  for (std::size_t i = 0; i < 16; ++i)
    differ = differ || truncated.frequencies()[i] != exact.frequencies()[i];
  EXPECT_TRUE(differ);
  EXPECT_NEAR(exact.attention_factor(), 0.1 * std::log(8.0) + 1, 1e-15);
  c.factor = 32;  // gpt-oss
  EXPECT_NEAR(Rope(c, RopeLayout::half).attention_factor(), 1.3466, 5e-5);
  c.attention_factor = 1.5;
  EXPECT_EQ(Rope(c, RopeLayout::half).attention_factor(), 1.5);
}

TEST(RopeTable, AnglesAreExactAtFourMillion) {
  const Rope rope(config(RopeType::standard, 64, 100000.0), RopeLayout::half);
  const std::vector<std::int64_t> positions = {0, 1, 8191, 4'000'000, std::int64_t{1} << 31};
  const RopeTable table = rope.table(positions);
  for (std::size_t t = 0; t < positions.size(); ++t) {
    for (std::size_t i = 0; i < 32; ++i) {
      const long double angle =
          static_cast<long double>(positions[t]) * static_cast<long double>(rope.frequencies()[i]);
      // One float rounding and what long double leaves at this size.
      EXPECT_NEAR(static_cast<double>(table.cosine[t * 32 + i]), static_cast<double>(cosl(angle)), 6.1e-8)
          << positions[t];
      EXPECT_NEAR(static_cast<double>(table.sine[t * 32 + i]), static_cast<double>(sinl(angle)), 6.1e-8)
          << positions[t];
    }
  }
}

#if defined(__SIZEOF_FLOAT128__)
// Against an exact product (113 bits hold 41 + 53) reduced by 2 pi to 113 bits.
TEST(RopeTable, AnglesAreExactFarBeyondLongDouble) {
  __extension__ using Quad = __float128;
  const Quad turn = 2 * (static_cast<Quad>(std::numbers::pi_v<long double>) +
                         static_cast<Quad>(-5.01655761266833202355732708e-20L));
  const Rope rope(config(RopeType::standard, 64, 100000.0), RopeLayout::half);
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  const std::vector<std::int64_t> positions = {4'000'000,    kFar - 1,        kFar,
                                               kFar + 12345, 1000 * kFar + 7, -kFar + 3};
  const RopeTable table = rope.table(positions);
  for (std::size_t t = 0; t < positions.size(); ++t) {
    for (std::size_t i = 0; i < 32; ++i) {
      const Quad angle = static_cast<Quad>(positions[t]) * static_cast<Quad>(rope.frequencies()[i]);
      const auto turns = static_cast<std::int64_t>(angle / turn);
      const auto rest = static_cast<long double>(angle - static_cast<Quad>(turns) * turn);
      // One float rounding of a number up to 1 is 2^-25.
      const double rounding = 0x1p-25 + 1e-13;
      EXPECT_NEAR(static_cast<double>(table.cosine[t * 32 + i]), static_cast<double>(cosl(rest)), rounding)
          << positions[t] << " pair " << i;
      EXPECT_NEAR(static_cast<double>(table.sine[t * 32 + i]), static_cast<double>(sinl(rest)), rounding)
          << positions[t] << " pair " << i;
    }
  }
}
#endif

TEST(RopeRotate, LayoutsPairWhatTheyShould) {
  ThreadPool pool(1);
  for (const RopeLayout layout : {RopeLayout::half, RopeLayout::interleaved}) {
    const Rope rope(config(RopeType::standard, 4), layout);
    const std::vector<std::int64_t> position = {3};
    std::vector<float> x = {1, 2, 3, 4, 5, 6}, y(6);  // two dimensions beyond rotary_dim
    rope.rotate(contiguous(static_cast<const void*>(x.data()), DType::f32, {1, 1, 6}), rope.table(position),
                contiguous(static_cast<void*>(y.data()), DType::f32, {1, 1, 6}), pool);
    const std::size_t a[2] = {0, layout == RopeLayout::half ? 1u : 2u};
    const std::size_t b[2] = {layout == RopeLayout::half ? 2u : 1u, 3};
    for (std::size_t i = 0; i < 2; ++i) {
      const double angle = 3 * rope.frequencies()[i], c = std::cos(angle), s = std::sin(angle);
      EXPECT_NEAR(static_cast<double>(y[a[i]]),
                  static_cast<double>(x[a[i]]) * c - static_cast<double>(x[b[i]]) * s, 1e-6);
      EXPECT_NEAR(static_cast<double>(y[b[i]]),
                  static_cast<double>(x[b[i]]) * c + static_cast<double>(x[a[i]]) * s, 1e-6);
    }
    EXPECT_EQ(y[4], 5);
    EXPECT_EQ(y[5], 6);
  }
}

// The identity that in-cache positions rest on: a score depends on the distance of the two positions only.
TEST(RopeRotate, ScoresDependOnDistanceOnly) {
  ThreadPool pool(1);
  const Rope rope(config(RopeType::standard, 32), RopeLayout::half);
  std::vector<float> q(32), k(32);
  for (std::size_t i = 0; i < 32; ++i) {
    q[i] = std::sin(static_cast<float>(i) + 1);
    k[i] = std::cos(static_cast<float>(i) * 2);
  }
  const auto score = [&](std::int64_t p, std::int64_t j) {
    std::vector<float> rq(32), rk(32);
    const auto turn = [&](const std::vector<float>& from, std::int64_t position, std::vector<float>& to) {
      rope.rotate(contiguous(static_cast<const void*>(from.data()), DType::f32, {1, 1, 32}),
                  rope.table({&position, 1}),
                  contiguous(static_cast<void*>(to.data()), DType::f32, {1, 1, 32}), pool);
    };
    turn(q, p, rq);
    turn(k, j, rk);
    double sum = 0;
    for (std::size_t i = 0; i < 32; ++i) sum += static_cast<double>(rq[i]) * static_cast<double>(rk[i]);
    return sum;
  };
  EXPECT_NEAR(score(1000, 990), score(10, 0), 2e-6);
  EXPECT_NEAR(score(4'000'000, 3'999'990), score(10, 0), 2e-6);
  EXPECT_GT(std::fabs(score(10, 0) - score(11, 0)), 1e-2);
}

TEST(RopeRotate, ThreadsShareNothing) {
  constexpr std::int64_t kTokens = 2048, kHeads = 2, kHead = 32;
  const Rope rope(config(RopeType::standard, kHead), RopeLayout::half);
  std::vector<std::int64_t> positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  const RopeTable table = rope.table(positions);
  const std::vector<float> x(kTokens * kHeads * kHead, 0.7f);
  const ConstView in = contiguous(static_cast<const void*>(x.data()), DType::f32, {kTokens, kHeads, kHead});
  const auto rotated = [&](ThreadPool& pool) {
    std::vector<float> y(x.size());
    rope.rotate(in, table, contiguous(static_cast<void*>(y.data()), DType::f32, {kTokens, kHeads, kHead}),
                pool);
    return y;
  };
  ThreadPool one(1), four(4);
  const std::vector<float> expected = rotated(one);
  for (int i = 0; i < 50; ++i) ASSERT_EQ(rotated(four), expected) << "run " << i;
}

TEST(RopeRotate, WritesHalfTypes) {
  ThreadPool pool(2);
  const Rope rope(config(RopeType::standard, 32), RopeLayout::half);
  std::vector<std::int64_t> positions(40);
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i) * 3;
  std::vector<float> x(40 * 2 * 32, 0.7f), y(x.size());
  std::vector<bf16> z(x.size());
  const RopeTable table = rope.table(positions);
  const ConstView in = contiguous(static_cast<const void*>(x.data()), DType::f32, {40, 2, 32});
  rope.rotate(in, table, contiguous(static_cast<void*>(y.data()), DType::f32, {40, 2, 32}), pool);
  rope.rotate(in, table, contiguous(static_cast<void*>(z.data()), DType::bf16, {40, 2, 32}), pool);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(z[i].bits, to_bf16(y[i]).bits);
}

TEST(RopeConfigRefused, NamesTheField) {
  const auto message = [](RopeConfig c) -> std::string {
    try {
      Rope(c, RopeLayout::half);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "accepted";
  };
  RopeConfig c = config(RopeType::standard, 31);
  EXPECT_NE(message(c).find("rotary_dim"), std::string::npos);
  c = config(RopeType::standard);
  c.theta = 0;
  EXPECT_NE(message(c).find("theta"), std::string::npos);
  c = config(RopeType::linear);
  c.factor = -1;
  EXPECT_NE(message(c).find("factor"), std::string::npos);
  c = config(RopeType::llama3);
  c.low_freq_factor = 5;
  EXPECT_NE(message(c).find("low_freq_factor"), std::string::npos);
  for (const RopeType type : {RopeType::standard, RopeType::linear, RopeType::llama3, RopeType::yarn}) {
    for (const double theta : {-1.0, 0.5, 1.0, double{INFINITY}, std::nan("")}) {
      EXPECT_NE(message(config(type, 32, theta)).find("rope theta"), std::string::npos) << theta;
    }
    EXPECT_EQ(message(config(type, 32, 1.5)).find("rope theta"), std::string::npos);
    if (type == RopeType::standard) continue;
    for (const double factor : {0.0, 1e-300, 0.99, double{INFINITY}, std::nan("")}) {
      c = config(type);
      c.factor = factor;
      EXPECT_NE(message(c).find("rope factor"), std::string::npos) << factor;
    }
  }
  // Frequencies that vanish: within the bounds each, absurd together.
  c = config(RopeType::linear, 128, 1e300);
  c.factor = 1e300;
  EXPECT_NE(message(c).find("pair"), std::string::npos);
  // The indices between which yarn interpolates lie on the wrong sides: a theta next to 1, a context below one turn.
  c = config(RopeType::yarn, 32, 1.0001);
  c.original_context = 8192;
  EXPECT_NE(message(c).find("yarn"), std::string::npos);
  c = config(RopeType::yarn);
  c.original_context = 1;
  EXPECT_NE(message(c).find("original context"), std::string::npos);
  c = config(RopeType::yarn);
  c.beta_slow = 5e-324;
  EXPECT_EQ(message(c), "accepted") << "slower than any pair: all are stretched";
  c = config(RopeType::yarn);
  c.original_context = 0;
  EXPECT_NE(message(c).find("original context"), std::string::npos);
  for (const double factor : {-1.0, 1e300, std::nan("")}) {
    c = config(RopeType::yarn);
    c.attention_factor = factor;
    EXPECT_NE(message(c).find("attention factor"), std::string::npos) << factor;
  }
}

}  // namespace
}  // namespace basin::ops
