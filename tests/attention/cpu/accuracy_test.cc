// Error against the double-precision reference, at most twice that of the reference rerun in the storage's precision.
#include <cmath>
#include <limits>

#include "attention/cpu/fixture.h"
#include "attention/cpu/problem.h"

namespace basin::attention::cpu_tests {
namespace {

class CpuAttentionAccuracy : public CpuTest {
 protected:
  static void check(const Shape& shape, const std::vector<Part>& parts, const Layout& layout,
                    const char* what) {
    SCOPED_TRACE(what);
    ThreadPool pool(2);
    const Errors error = errors(shape, parts, layout, [&](const Forward& problem) { run(problem, pool); });
    // The floor is one step of an lse up to 8, for problems that the yardstick happens to hit exactly.
    EXPECT_LE(error.got.rms, 2 * error.allowed.rms + 0x1p-25);
    EXPECT_LE(error.got.largest, 2 * error.allowed.largest + 0x1p-21);
    EXPECT_TRUE(error.sentinels_intact);
  }
};

Shape with(DType dtype, DType out, Mask mask) {
  Shape shape;
  shape.dtype = dtype;
  shape.out_dtype = out;
  shape.spec.mask = mask;
  return shape;
}

constexpr DType kStorages[] = {DType::f32, DType::f16, DType::bf16};

TEST_F(CpuAttentionAccuracy, EveryStorageAndFeature) {
  const std::vector<Part> parts = {{0, 37, 150}, {1, 1, 300}, {2, 5, 3}, {3, 64, 64}};
  for (const DType dtype : kStorages) {
    for (const DType out : {DType::f32, dtype}) {
      const std::string name_of = std::string(name(dtype)) + " to " + std::string(name(out));
      SCOPED_TRACE(name_of);
      Shape causal = with(dtype, out, {});
      check(causal, parts, {}, "causal");
      check(causal, parts, {16, true}, "causal, paged, loose strides");

      Shape full = with(dtype, out, {.causal = false});
      check(full, parts, {}, "full");

      Shape window = with(dtype, out, {.window = 33});
      window.sink_logit = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -0.25f};
      check(window, parts, {}, "window and sink logit");

      Shape two_sided = with(dtype, out, {.causal = false, .window = 20, .window_right = 7});
      check(two_sided, parts, {7, false}, "two-sided window, pages of 7");

      Shape sinks = with(dtype, out, {.window = 40, .sink_tokens = 4});
      sinks.sink_logit = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -0.25f};
      check(sinks, parts, {}, "sink tokens, window and sink logit");
      sinks.q_sink = true;
      check(sinks, parts, {1, false}, "second query, pages of 1");
      sinks.spec.mask.sink_tokens = 70;
      check(sinks, parts, {}, "second query across a tile");

      Shape softcap = with(dtype, out, {});
      softcap.spec.softcap = 3.0;
      softcap.spread = 8.0f;
      check(softcap, parts, {}, "softcap");
    }
  }
}

TEST_F(CpuAttentionAccuracy, EveryHeadSize) {
  for (const DType dtype : kStorages) {
    for (std::int64_t d = 16; d <= 256; d += 16) {
      SCOPED_TRACE(d);
      Shape shape = with(dtype, DType::f32, {});
      shape.d_qk = d;
      shape.d_v = 272 - d;
      shape.h_q = 5;
      shape.h_kv = 1;
      check(shape, {{0, 9, 100}}, {}, "d_qk + d_v = 272");
    }
  }
}

TEST_F(CpuAttentionAccuracy, EveryGroupSize) {
  for (const DType dtype : kStorages) {
    for (std::int64_t group = 1; group <= 9; ++group) {
      SCOPED_TRACE(group);
      Shape shape = with(dtype, DType::f32, {.window = 50});
      shape.h_kv = 2;
      shape.h_q = 2 * group;
      check(shape, {{0, 1, 200}, {1, 6, 90}}, {}, "group");
    }
    Shape mqa = with(dtype, DType::f32, {});
    mqa.h_kv = 1;
    mqa.h_q = 200;  // one query has more rows than a block
    mqa.d_qk = mqa.d_v = 16;
    check(mqa, {{0, 3, 70}}, {}, "200 query heads on one kv head");
  }
}

TEST_F(CpuAttentionAccuracy, LengthsAroundTilesAndSegments) {
  for (const DType dtype : kStorages) {
    for (const std::int64_t n : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2049, 3000}) {
      SCOPED_TRACE(n);
      Shape shape = with(dtype, DType::f32, {});
      shape.h_q = 3;
      shape.h_kv = 1;
      check(shape, {{0, 1, n}, {1, 2, n}}, {}, "decode");
      shape.spec.mask = {.window = 1024, .sink_tokens = 4};
      check(shape, {{0, 2, n}}, {64, false}, "streaming decode");
    }
  }
}

TEST_F(CpuAttentionAccuracy, LargeScoresAndRescaling) {
  for (const DType dtype : kStorages) {
    Shape shape = with(dtype, DType::f32, {});
    shape.spec.scale = 3.0;
    shape.spread = 20.0f;
    check(shape, {{0, 20, 1500}}, {}, "one key takes nearly everything");
    shape.spec.scale = 0.0001;
    check(shape, {{0, 20, 1500}}, {}, "all keys count the same");
  }
}

// With q = 0 and v = 1 the output is n / (n + e^sink), whatever the maths: 1 means a dropped sink, n / (n + 2 e^s) one
// that counted twice, n / (n + e^(s scale)) a scaled one.
TEST_F(CpuAttentionAccuracy, ProbeOfTheSinkLogit) {
  for (const DType dtype : kStorages) {
    for (const std::int64_t q_tokens : {std::int64_t{1}, std::int64_t{5}, std::int64_t{40}}) {
      for (const std::int64_t n : {std::int64_t{40}, std::int64_t{128}, std::int64_t{2500}}) {
        Shape shape = with(dtype, DType::f32, {.causal = false});
        shape.sink_logit = {2.0f, 0.0f, -3.0f, 5.0f, 1.0f, 7.0f};
        Problem problem(shape, {{0, q_tokens, n}}, {});
        for (std::int64_t row = 0; row < q_tokens; ++row) {
          for (std::int64_t h = 0; h < 6; ++h) {
            for (std::int64_t d = 0; d < 64; ++d) problem.set_query(row, h, d, 0.0f);
          }
        }
        for (std::int64_t j = 0; j < n; ++j) {
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t d = 0; d < 64; ++d) problem.set_value(0, j, h, d, 1.0f);
          }
        }
        ThreadPool pool(2);
        run(problem.forward(), pool);
        for (std::int64_t row = 0; row < q_tokens; ++row) {
          for (std::int64_t h = 0; h < 6; ++h) {
            const auto keys = static_cast<double>(n);
            const double e = std::exp(static_cast<double>(shape.sink_logit[static_cast<std::size_t>(h)]));
            ASSERT_NEAR(static_cast<double>(problem.out(row, h, 11)), keys / (keys + e), 1e-6);
            ASSERT_NEAR(static_cast<double>(problem.lse(row, h)), std::log(keys), 1e-6);
            ASSERT_NEAR(static_cast<double>(problem.lse_with_sink(row, h)), std::log(keys + e), 2e-6);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace basin::attention::cpu_tests
