// A row's bits depend on its own visible keys only.
#include <cmath>
#include <limits>

#include "attention/cpu/fixture.h"
#include "attention/cpu/problem.h"

namespace basin::attention::cpu_tests {
namespace {

using Bits = std::vector<std::vector<std::uint32_t>>;

constexpr DType kStorages[] = {DType::f32, DType::f16, DType::bf16};

class CpuAttentionBits : public CpuTest {
 protected:
  ThreadPool one_{1}, two_{2};

  Bits chunks(const Shape& shape, std::int64_t tokens, std::int64_t chunk, const Layout& layout,
              int threads) {
    ThreadPool& pool = threads == 1 ? one_ : two_;
    return in_chunks(shape, 7, tokens, chunk, layout, [&](const Forward& p) { run(p, pool); });
  }

  static std::vector<Shape> shapes(DType dtype) {
    std::vector<Shape> result(6);
    result[1].spec.mask = {.window = 100};
    result[1].sink_logit = {0.5f, -1.0f, 2.0f};
    result[2].spec.mask = {.window = 90, .sink_tokens = 5};
    result[2].q_sink = true;
    result[3].spec.softcap = 2.0;
    result[3].spec.mask = {.window = 700, .sink_tokens = 70};
    result[4].h_q = 4;
    result[4].h_kv = 4;
    result[5].value_scale = 0x1p-123f;  // whose products with probabilities are subnormal numbers
    for (Shape& shape : result) {
      shape.dtype = dtype;
      shape.d_qk = 32;
      shape.d_v = 48;
      shape.spread = 4.0f;
      if (shape.h_q == 6) {
        shape.h_q = 3;
        shape.h_kv = 1;
      }
    }
    return result;
  }
};

TEST_F(CpuAttentionBits, ChunksPagesAndThreads) {
  constexpr std::int64_t kTokens = 1100;  // two segments
  for (const DType dtype : kStorages) {
    for (const Shape& shape : shapes(dtype)) {
      const Bits whole = chunks(shape, kTokens, kTokens, {}, 1);
      ASSERT_EQ(whole.size(), static_cast<std::size_t>(kTokens));
      EXPECT_EQ(whole, chunks(shape, kTokens, kTokens, {16, true}, 2));
      EXPECT_EQ(whole, chunks(shape, kTokens, 512, {64, false}, 2));
      EXPECT_EQ(whole, chunks(shape, kTokens, 64, {1, false}, 1));
    }
    const Shape shape = shapes(dtype)[2];
    const Bits whole = chunks(shape, kTokens, kTokens, {}, 2);
    EXPECT_EQ(whole, chunks(shape, kTokens, 7, {16, false}, 2));
    EXPECT_EQ(whole, chunks(shape, kTokens, 1, {64, false}, 2));
    EXPECT_EQ(whole, chunks(shape, kTokens, 1, {}, 1));
  }
}

TEST_F(CpuAttentionBits, LongDecodeIsSplitOverThreadsWithoutTrace) {
  for (const DType dtype : kStorages) {
    for (Shape shape : shapes(dtype)) {
      shape.d_qk = shape.d_v = 64;
      const std::vector<Part> parts = {{3, 1, 5000}};
      Problem a(shape, parts, {}), b(shape, parts, {16, true}), c(shape, {{3, 40, 5000}}, {});
      run(a.forward(), one_);
      run(b.forward(), two_);
      run(c.forward(), two_);
      EXPECT_EQ(a.bits(), b.bits());
      EXPECT_EQ(a.bits()[0], c.bits()[39]);
    }
  }
}

TEST_F(CpuAttentionBits, AloneOrInABatch) {
  for (const DType dtype : kStorages) {
    for (const Shape& shape : shapes(dtype)) {
      const std::vector<Part> parts = {{1, 3, 200}, {2, 1, 1300}, {3, 0, 50},
                                       {4, 90, 90}, {5, 2, 0},    {6, 4, 2}};
      Problem batch(shape, parts, {16, false});
      run(batch.forward(), two_);
      const Bits rows = batch.bits();
      std::size_t row = 0;
      for (const Part& part : parts) {
        if (part.q_tokens == 0) continue;
        Problem alone(shape, {part}, {});
        run(alone.forward(), one_);
        for (const auto& bits : alone.bits()) EXPECT_EQ(bits, rows[row++]);
      }
    }
  }
}

TEST_F(CpuAttentionBits, AWindowThatReachesEverythingIsNoWindow) {
  for (const DType dtype : kStorages) {
    Shape shape = shapes(dtype)[0];
    const Bits none = chunks(shape, 300, 300, {}, 2);
    for (const std::int64_t window :
         {std::int64_t{300}, std::int64_t{1000}, std::numeric_limits<std::int64_t>::max()}) {
      shape.spec.mask.window = window;
      EXPECT_EQ(none, chunks(shape, 300, 300, {}, 2)) << window;
      shape.spec.mask.sink_tokens = 9;
      EXPECT_EQ(none, chunks(shape, 300, 300, {}, 2)) << window;
      shape.spec.mask.sink_tokens = 0;
    }
    shape.spec.mask.window = 0;
    shape.spec.mask.window_right = 0;  // causal already ends there
    EXPECT_EQ(none, chunks(shape, 300, 300, {}, 2));
  }
}

TEST_F(CpuAttentionBits, HeadsDoNotDependOnTheirGroup) {
  for (const DType dtype : kStorages) {
    Shape grouped = shapes(dtype)[1];
    Shape single = grouped;
    single.h_q = 1;
    single.sink_logit = {grouped.sink_logit[0]};
    Problem many(grouped, {{2, 30, 150}}, {}), one(single, {{2, 30, 150}}, {});
    run(many.forward(), two_);
    run(one.forward(), one_);
    for (std::int64_t row = 0; row < 30; ++row) {
      for (std::int64_t d = 0; d < grouped.d_v; ++d) ASSERT_EQ(many.out(row, 0, d), one.out(row, 0, d));
    }
  }
}

// Later keys (of the same tile) that turn infinite or NaN must not reach the rows that do not see them.
TEST_F(CpuAttentionBits, PoisonedNeighboursDoNotLeak) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const DType dtype : kStorages) {
    for (const Shape& shape : shapes(dtype)) {
      Problem clean(shape, {{1, 100, 130}}, {}), poisoned(shape, {{1, 100, 130}}, {});
      constexpr std::int64_t kFirstBad = 71;  // rows before query 71 - 30 do not see it
      for (std::int64_t j = kFirstBad; j < 130; ++j) {
        for (std::int64_t h = 0; h < shape.h_kv; ++h) {
          for (std::int64_t d = 0; d < shape.d_qk; ++d)
            poisoned.set_key(0, j, h, d, j % 2 == 0 ? kNaN : kInf);
          for (std::int64_t d = 0; d < shape.d_v; ++d)
            poisoned.set_value(0, j, h, d, j % 3 == 0 ? kNaN : -kInf);
        }
      }
      run(clean.forward(), two_);
      run(poisoned.forward(), two_);
      const Bits a = clean.bits(), b = poisoned.bits();
      for (std::size_t row = 0; row < kFirstBad - 30; ++row) EXPECT_EQ(a[row], b[row]) << row;
      EXPECT_TRUE(std::isnan(poisoned.out(60, 0, 0)));  // a visible NaN is not hidden
    }
  }
}

}  // namespace
}  // namespace basin::attention::cpu_tests
