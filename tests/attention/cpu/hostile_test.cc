// Extreme sinks, empty rows, and what is refused.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <vector>

#include "attention/cpu/fixture.h"
#include "attention/cpu/problem.h"
#include "basin/base/error.h"
#include "support/sanitizer.h"

namespace basin::attention::cpu_tests {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr DType kStorages[] = {DType::f32, DType::f16, DType::bf16};

class CpuAttentionHostile : public CpuTest {
 protected:
  ThreadPool pool_{2};
};

TEST_F(CpuAttentionHostile, ExtremeSinks) {
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    shape.spec.mask = {.window = 50};
    Problem plain(shape, {{0, 20, 100}}, {});
    run(plain.forward(), pool_);
    shape.sink_logit = {-kInf, kInf, 300.0f, -300.0f, 0.0f, 30.0f};
    Problem sinks(shape, {{0, 20, 100}}, {});
    run(sinks.forward(), pool_);
    for (std::int64_t row = 0; row < 20; ++row) {
      for (std::int64_t h = 0; h < 6; ++h) {
        ASSERT_EQ(sinks.lse(row, h), plain.lse(row, h));
        const float sink = shape.sink_logit[static_cast<std::size_t>(h)];
        const double expected = std::max(static_cast<double>(sink), static_cast<double>(plain.lse(row, h)));
        if (std::abs(sink) >= 300.0f) {
          ASSERT_EQ(sinks.lse_with_sink(row, h), static_cast<float>(expected));
        }
        ASSERT_FALSE(std::isnan(sinks.lse_with_sink(row, h)));
        for (std::int64_t d = 0; d < 64; ++d) {
          if (sink <= -300.0f) {
            ASSERT_EQ(sinks.out(row, h, d), plain.out(row, h, d));
          }
          if (sink >= 300.0f) {
            ASSERT_EQ(sinks.out(row, h, d), 0.0f);
          }
        }
      }
    }
  }
}

TEST_F(CpuAttentionHostile, RowsWithoutKeys) {
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    shape.sink_logit = {-kInf, kInf, 300.0f, -300.0f, 0.0f, 1.5f};
    // No keys at all; more queries than keys under causal (the first 6 rows see nothing); no queries.
    Problem problem(shape, {{0, 3, 0}, {1, 10, 4}, {2, 0, 10}}, {});
    run(problem.forward(), pool_);
    for (std::int64_t row = 0; row < 9; ++row) {
      for (std::int64_t h = 0; h < 6; ++h) {
        for (std::int64_t d = 0; d < 64; ++d) ASSERT_EQ(problem.out(row, h, d), 0.0f);
        ASSERT_EQ(problem.lse(row, h), -kInf);
        ASSERT_EQ(problem.lse_with_sink(row, h), shape.sink_logit[static_cast<std::size_t>(h)]);
      }
    }
    for (std::int64_t row = 9; row < 13; ++row) ASSERT_TRUE(std::isfinite(problem.lse(row, 0)));
    EXPECT_TRUE(problem.sentinels_intact());
  }
}

// Without a sink and with optional outputs absent.
TEST_F(CpuAttentionHostile, OptionalOutputsMayBeAbsent) {
  Shape shape;
  Problem with(shape, {{0, 5, 30}}, {}), without(shape, {{0, 5, 30}}, {});
  run(with.forward(), pool_);
  Forward problem = without.forward();
  problem.lse = nullptr;
  problem.lse_with_sink = nullptr;
  run(problem, pool_);
  for (std::int64_t row = 0; row < 5; ++row) {
    for (std::int64_t h = 0; h < 6; ++h) {
      ASSERT_EQ(with.lse(row, h), with.lse_with_sink(row, h));
      for (std::int64_t d = 0; d < 64; ++d) ASSERT_EQ(with.out(row, h, d), without.out(row, h, d));
    }
  }
}

TEST_F(CpuAttentionHostile, ScoresOfAllSizes) {
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    for (const double scale : {1e-30, 1e4, -1e4, 0.0}) {
      shape.spec.scale = scale == 0.0 ? 1e-300 : scale;
      Problem problem(shape, {{0, 5, 1300}}, {});
      run(problem.forward(), pool_);
      for (std::int64_t row = 0; row < 5; ++row) {
        for (std::int64_t h = 0; h < 6; ++h) {
          ASSERT_TRUE(std::isfinite(problem.lse(row, h)));
          for (std::int64_t d = 0; d < 64; ++d) ASSERT_LE(std::abs(problem.out(row, h, d)), 1.0f);
        }
      }
    }
  }
}

#ifdef BASIN_HAS_ADDRESS_SANITIZER
// The kernels are compiled with fewer checks than the rest (cmake/options.cmake): this one must stay.
TEST_F(CpuAttentionHostile, TheSanitizerSeesAReadBeyondTheKeysOrValues) {
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    shape.h_q = shape.h_kv = 1;
    const Problem problem(shape, {{0, 1, 3}}, {});
    for (ConstView Forward::*const view : {&Forward::k, &Forward::v}) {
      Forward cut = problem.forward();
      const auto* whole = static_cast<const std::byte*>((cut.*view).data);
      const std::vector<std::byte> memory(whole, whole + 3 * 64 * block_bytes(dtype) - 1);
      (cut.*view).data = memory.data();
      const auto run_one_thread = [&] {
        ThreadPool pool(1);
        run(cut, pool);
      };
      EXPECT_DEATH(run_one_thread(), "AddressSanitizer") << name(dtype);
    }
  }
}
#endif

TEST_F(CpuAttentionHostile, RefusalsNameWhatWasAskedAndWhatExists) {
  const auto reason = [](const Shape& shape) {
    Problem problem(shape, {{0, 1, 1}}, {});
    return cpu::supported(problem.forward());
  };
  Shape shape;
  EXPECT_EQ(reason(shape), "");
  shape.d_qk = 24;
  EXPECT_THAT(reason(shape), testing::AllOf(testing::HasSubstr("d_qk is 24"), testing::HasSubstr("256")));
  shape.d_qk = 64;
  shape.d_v = 272;
  EXPECT_THAT(reason(shape), testing::HasSubstr("d_v is 272"));
  shape.d_v = 64;
  shape.out_dtype = DType::f16;
  EXPECT_THAT(reason(shape), testing::AllOf(testing::HasSubstr("out is f16"), testing::HasSubstr("bf16")));
  shape.out_dtype = DType::f32;
  Problem problem(shape, {{0, 1, 1}}, {});
  Forward mixed = problem.forward();
  mixed.v.dtype = DType::f16;
  EXPECT_THAT(cpu::supported(mixed), testing::HasSubstr("bf16, bf16 and f16"));
  EXPECT_THROW(cpu::forward(mixed, pool_), Error);
  mixed = problem.forward();
  mixed.q.dtype = mixed.k.dtype = mixed.v.dtype = DType::f64;
  EXPECT_THAT(cpu::supported(mixed), testing::HasSubstr("f64"));
}

}  // namespace
}  // namespace basin::attention::cpu_tests
