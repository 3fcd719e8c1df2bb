// Random problems against the reference: shapes, masks, pages, strides, batches.
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>

#include "attention/cpu/fixture.h"
#include "attention/cpu/problem.h"

namespace basin::attention::cpu_tests {
namespace {

class CpuAttentionProperty : public CpuTest {};

template <typename T>
T pick(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

std::int64_t between(std::int64_t low, std::int64_t high) {
  return *rc::gen::inRange<std::int64_t>(low, high + 1);
}

TEST_F(CpuAttentionProperty, EqualsTheReference) {
  ThreadPool pool(2);
  EXPECT_TRUE(rc::check("fast path equals the reference", [&] {
    Shape shape;
    shape.dtype = pick({DType::f32, DType::f16, DType::bf16});
    shape.out_dtype = pick({DType::f32, shape.dtype});
    shape.h_kv = between(1, 3);
    shape.h_q = shape.h_kv * between(1, 7);
    shape.d_qk = 16 * between(1, 8);
    shape.d_v = 16 * between(1, 8);
    Mask& mask = shape.spec.mask;
    mask.causal = *rc::gen::arbitrary<bool>();
    mask.window = pick<std::int64_t>({0, 1, 2, 17, 64, 100});
    mask.window_right = pick<std::int64_t>({-1, -1, 0, 3, 70});
    mask.sink_tokens = pick<std::int64_t>({0, 0, 1, 4, 66});
    shape.q_sink = *rc::gen::arbitrary<bool>();
    shape.spec.softcap = pick({0.0, 0.0, 1.5});
    if (*rc::gen::arbitrary<bool>()) {
      for (std::int64_t h = 0; h < shape.h_q; ++h) {
        shape.sink_logit.push_back(static_cast<float>(between(-40, 40)) / 10.0f);
      }
    }
    std::vector<Part> parts;
    const std::int64_t count = between(1, 3);
    for (std::int64_t s = 0; s < count; ++s) parts.push_back({s, between(0, 40), between(0, 200)});
    const Layout layout{pick<std::int64_t>({0, 1, 3, 16, 64}), *rc::gen::arbitrary<bool>()};

    const auto [got, allowed, rounding, sentinels_intact] =
        errors(shape, parts, layout, [&](const Forward& problem) { run(problem, pool); });
    // Few values: the largest error of a small sample wanders, so its bound is wider than that of the fixed cases. And a few
    // outputs that lie between two values of a narrow type may be rounded the other way, where the yardstick has none.
    constexpr double kFew = 6;
    const double of_few =
        rounding * std::sqrt(kFew / static_cast<double>(std::max<std::int64_t>(got.count, 1)));
    RC_ASSERT(got.rms <= 2 * allowed.rms + of_few + 0x1p-22);
    RC_ASSERT(got.largest <= 3 * allowed.largest + rounding + 0x1p-21);
    RC_ASSERT(sentinels_intact);
  }));
}

TEST_F(CpuAttentionProperty, ChunksEqualTheWhole) {
  ThreadPool pool(2);
  EXPECT_TRUE(rc::check("chunks equal the whole bit for bit", [&] {
    Shape shape;
    shape.dtype = pick({DType::f32, DType::f16, DType::bf16});
    shape.h_kv = 1;
    shape.h_q = between(1, 7);
    shape.d_qk = shape.d_v = 16;
    shape.spec.mask.window = between(0, 150);
    shape.spec.mask.sink_tokens = between(0, 80);
    shape.q_sink = *rc::gen::arbitrary<bool>();
    shape.spread = 5.0f;
    const std::int64_t tokens = between(1, 300);
    const auto forward_with = [&](const Forward& p) { run(p, pool); };
    RC_ASSERT(in_chunks(shape, 0, tokens, tokens, {}, forward_with) ==
              in_chunks(shape, 0, tokens, between(1, 70), {between(0, 20), false}, forward_with));
  }));
}

}  // namespace
}  // namespace basin::attention::cpu_tests
