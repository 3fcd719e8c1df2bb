// The radix select against a full sort: ties, plateaus, values that differ in their lowest bits, long rows.
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "attention/cpu/fixture.h"
#include "basin/base/error.h"

namespace basin::attention::cpu_tests {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<std::int32_t> by_sort(const std::vector<float>& scores, std::int64_t topk) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(std::max<std::int64_t>(topk, 0))));
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<std::int32_t> by_radix(const std::vector<float>& scores, std::int64_t topk) {
  const std::size_t room = static_cast<std::size_t>(std::max<std::int64_t>(topk, 0));
  std::vector<std::int32_t> out(room + 1, -9);
  const std::int64_t count = cpu::select_topk(scores, topk, out.data());
  EXPECT_EQ(out.back(), -9) << "wrote past topk";
  out.resize(static_cast<std::size_t>(count));
  return out;
}

void expect_equal(const std::vector<float>& scores, std::initializer_list<std::int64_t> counts) {
  for (const std::int64_t topk : counts) EXPECT_EQ(by_radix(scores, topk), by_sort(scores, topk)) << topk;
}

std::vector<float> made(std::size_t count, const std::function<float(std::size_t)>& value) {
  std::vector<float> scores(count);
  for (std::size_t i = 0; i < count; ++i) scores[i] = value(i);
  return scores;
}

TEST(SelectTopk, EqualsASortOnAnyValues) {
  EXPECT_TRUE(rc::check("radix select equals a stable sort", [] {
    // Few distinct values, so that most rows have ties across the boundary.
    const auto values = *rc::gen::container<std::vector<float>>(
        rc::gen::elementOf(std::vector<float>{0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, -1e-45f, kInf, -kInf, 3.5f,
                                              std::nextafter(3.5f, 4.0f), 1e30f, -1e30f}));
    const auto topk = *rc::gen::inRange<std::int64_t>(0, 40);
    RC_ASSERT(by_radix(values, topk) == by_sort(values, topk));
    const auto bits = *rc::gen::container<std::vector<std::uint32_t>>(rc::gen::arbitrary<std::uint32_t>());
    std::vector<float> any;
    for (const std::uint32_t word : bits) {
      const float value = std::bit_cast<float>(word);
      if (value == value) any.push_back(value);
    }
    RC_ASSERT(by_radix(any, topk) == by_sort(any, topk));
  }));
}

// Reports of other kernels, one after another: docs/sparse-bugs.md.
TEST(SelectTopk, PlateauOfZerosGivesTheFirstOfThem) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto scores = made(8320, [&](std::size_t) { return std::max(normal(random) - 1.28f, 0.0f); });
  const auto first = by_radix(scores, 2048);
  EXPECT_EQ(first, by_sort(scores, 2048));
  for (int replay = 0; replay < 25; ++replay) ASSERT_EQ(by_radix(scores, 2048), first);
  // 100 winners before 8,220 zeros: 2,048 different valid positions all the same.
  expect_equal(made(8320, [](std::size_t i) { return i % 83 == 0 && i < 8300 ? 1.0f : 0.0f; }),
               {2048, 100, 101});
}

TEST(SelectTopk, ManyValuesInOneCoarseBucket) {
  // 5,000 values whose first byte as fp16 is one, in a row of 131,072.
  std::mt19937 random(4);
  std::uniform_real_distribution<float> close(1.0f, 1.2f), far(0.0f, 0.9f);
  const auto wide = made(131072, [&](std::size_t i) { return i % 26 == 0 ? close(random) : far(random); });
  expect_equal(wide, {2048, 5000, 5042, 5100});
  // 4,139 different floats next to each other; values that differ in their lowest 10 bits only.
  const auto next = made(4139, [](std::size_t i) {
    return std::bit_cast<float>(0x3f800000u + static_cast<std::uint32_t>(i * 2654435761u % 4139u));
  });
  expect_equal(next, {1, 2048, 4138});
  const auto low = made(20000, [](std::size_t i) {
    return std::bit_cast<float>(0x40490c00u | static_cast<std::uint32_t>(i * 40503u % 1024u));
  });
  expect_equal(low, {512, 2048, 19999});
}

TEST(SelectTopk, FewAboveTheLowestOfHalfPrecision) {
  // Fewer than topk scores above -65504, and a length that is no multiple of any tile.
  expect_equal(
      made(4099, [](std::size_t i) { return i % 50 == 0 ? -1.0f : -70000.0f - static_cast<float>(i % 7); }),
      {2048});
  expect_equal(made(3001, [](std::size_t i) { return i < 10 ? 1.0f : -kInf; }), {2048});
}

TEST(SelectTopk, RowsOfAMillion) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const std::size_t count : {std::size_t{262209}, std::size_t{1} << 20}) {
    const auto scores = made(count, [&](std::size_t) { return std::max(normal(random), 0.0f); });
    expect_equal(scores, {1, 2048, static_cast<std::int64_t>(count) - 1, static_cast<std::int64_t>(count)});
  }
}

TEST(SelectTopk, RefusesNan) {
  for (const std::int64_t topk : {0, 2, 10}) {
    std::vector<float> scores = {1.0f, 2.0f, std::numeric_limits<float>::quiet_NaN(), 3.0f};
    std::vector<std::int32_t> out(10);
    try {
      cpu::select_topk(scores, topk, out.data());
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()), "score 2 of 4 is NaN; nobody can say where it stands");
    }
  }
  EXPECT_EQ(by_radix({}, 5).size(), 0u);
}

}  // namespace
}  // namespace basin::attention::cpu_tests
