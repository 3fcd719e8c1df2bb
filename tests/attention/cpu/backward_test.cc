// The backward pass: error against the reference in double, at most twice that of plain loops in the storage's precision;
// the same bits alone and in any batch, on any number of threads; nothing of what no row sees.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "attention/cpu/fixture.h"
#include "attention/cpu/gradients.h"
#include "attention/cpu/problem.h"
#include "attention/reference/rows.h"
#include "basin/attention/mask.h"
#include "basin/attention/reference.h"
#include "basin/base/error.h"

namespace basin::attention::cpu_tests {
namespace {

constexpr DType kStorages[] = {DType::f32, DType::f16, DType::bf16};

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

class CpuAttentionBackward : public CpuTest {
 protected:
  static void backward_on_cpu(const Backward& problem, ThreadPool& pool) {
    const Ran ran = backward(problem, Backend::cpu, pool);
    ASSERT_EQ(ran.backend, "cpu");
    ASSERT_EQ(ran.target, cpu::target_name());
  }

  static void check(const Shape& shape, const std::vector<Part>& parts, const Layout& layout,
                    const char* what, bool with_dlse = true) {
    SCOPED_TRACE(what);
    const Problem problem(shape, parts, layout);
    Gradients exact(problem, shape, parts, DType::f64, with_dlse);
    reference::backward(exact.backward);
    const std::vector<double> want = exact.all();
    ThreadPool pool(2);
    for (const DType dtype : {DType::f32, shape.dtype}) {
      SCOPED_TRACE(name(dtype));
      Gradients got(problem, shape, parts, dtype, with_dlse), plain(problem, shape, parts, dtype, with_dlse);
      backward_on_cpu(got.backward, pool);
      plain_backward(plain.backward);
      EXPECT_LE(root_mean_square(got.all(), want), 2 * root_mean_square(plain.all(), want) + 0x1p-30);
      for (std::size_t h = 0; h < got.dsink.size() && problem.forward().sink_logit != nullptr; ++h) {
        const auto expected = static_cast<double>(exact.dsink[h]);
        const double allowed = std::abs(static_cast<double>(plain.dsink[h]) - expected);
        // The error of one sum may be anything below its bound: that of rounding O in every row, and a step of the result.
        const double storage = shape.dtype == DType::bf16  ? 0x1p-9
                               : shape.dtype == DType::f16 ? 0x1p-12
                                                           : 0x1p-22;
        EXPECT_NEAR(static_cast<double>(got.dsink[h]), expected,
                    2 * allowed + 8 * storage * (std::abs(expected) + 1));
      }
    }
  }

  static std::vector<Shape> shapes(DType dtype) {
    std::vector<Shape> result(7);
    result[1].spec.mask = {.window = 100};
    result[1].sink_logit = {0.5f, -1.0f, 2.0f};
    result[2].spec.mask = {.window = 90, .sink_tokens = 5};
    result[3].spec.softcap = 2.0;
    result[3].spec.mask = {.window = 700, .sink_tokens = 70};
    result[3].sink_logit = {0.5f, -1.0f, 2.0f};
    result[4].spec.mask = {.causal = false, .window = 20, .window_right = 7};
    result[5].spec.mask = {.causal = false};
    for (Shape& shape : result) {
      shape.dtype = dtype;
      shape.d_qk = 32;
      shape.d_v = 48;
      shape.h_q = 3;
      shape.h_kv = 1;
    }
    result[6].h_q = 4;
    result[6].h_kv = 4;
    return result;
  }
};

TEST_F(CpuAttentionBackward, EveryStorageAndFeature) {
  const std::vector<Part> parts = {{0, 37, 150}, {1, 1, 300}, {2, 5, 3}, {3, 64, 64}, {4, 0, 20}, {5, 4, 0}};
  for (const DType dtype : kStorages) {
    SCOPED_TRACE(name(dtype));
    for (const Shape& shape : shapes(dtype)) {
      check(shape, parts, {}, "contiguous");
      check(shape, parts, {16, true}, "paged, loose strides", false);
    }
  }
}

TEST_F(CpuAttentionBackward, EveryHeadSize) {
  for (const DType dtype : kStorages) {
    for (std::int64_t d = 16; d <= 256; d += 48) {
      SCOPED_TRACE(d);
      Shape shape = shapes(dtype)[1];
      shape.d_qk = d;
      shape.d_v = 272 - d;
      check(shape, {{0, 9, 100}}, {}, "d_qk + d_v = 272");
    }
  }
}

// Rows beyond a chunk, keys beyond a tile: 600 queries of 3 heads are four chunks.
TEST_F(CpuAttentionBackward, LongSequences) {
  for (const Shape& shape : shapes(DType::f32)) check(shape, {{0, 300, 400}}, {}, "long");
  for (const DType dtype : {DType::f16, DType::bf16}) check(shapes(dtype)[2], {{0, 600, 700}}, {}, "longer");
}

TEST_F(CpuAttentionBackward, SinksAtTheExtremes) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<Part> parts = {{0, 20, 30}, {1, 4, 0}};  // rows without a key, too
  for (const DType dtype : kStorages) {
    Shape shape = shapes(dtype)[0];
    for (const std::vector<float>& sinks :
         {std::vector{300.0f, -300.0f, 80.0f}, std::vector{kInf, 0.0f, -kInf}}) {
      shape.sink_logit = sinks;
      const Problem problem(shape, parts, {});
      Gradients exact(problem, shape, parts, DType::f64), got(problem, shape, parts, DType::f32);
      reference::backward(exact.backward);
      ThreadPool pool(2);
      backward_on_cpu(got.backward, pool);
      const double storage = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-20;
      EXPECT_LE(root_mean_square(got.all(), exact.all()), storage);
      for (std::size_t h = 0; h < sinks.size(); ++h)
        EXPECT_NEAR(static_cast<double>(got.dsink[h]), static_cast<double>(exact.dsink[h]), 100 * storage)
            << sinks[h];
    }
  }
}

TEST_F(CpuAttentionBackward, SameBitsAloneAndInAnyBatchAndOnAnyThreads) {
  const std::vector<Part> parts = {{1, 3, 200},   {2, 1, 1300}, {3, 0, 50},
                                   {4, 400, 400}, {5, 2, 0},    {6, 4, 2}};
  for (const DType dtype : kStorages) {
    for (const Shape& shape : shapes(dtype)) {
      const Problem problem(shape, parts, {});
      std::vector<float> dsink;
      for (const int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        Gradients batch(problem, shape, parts, dtype);
        backward_on_cpu(batch.backward, pool);
        if (threads == 1) dsink = batch.dsink;
        EXPECT_EQ(batch.dsink, dsink);
        for (std::size_t s = 0; s < parts.size(); ++s) {
          ThreadPool other(3);
          const Problem one(shape, {parts[s]}, {});
          Gradients alone(one, shape, {parts[s]}, dtype);
          backward_on_cpu(alone.backward, other);
          EXPECT_EQ(alone.of_sequence(0), batch.of_sequence(s)) << threads << " threads, sequence " << s;
        }
      }
    }
  }
}

TEST_F(CpuAttentionBackward, WhatForwardReturnedMayBeGivenAgain) {
  for (const DType dtype : kStorages) {
    Shape shape = shapes(dtype)[3];
    shape.out_dtype = dtype;
    const std::vector<Part> parts = {{1, 70, 200}, {2, 300, 300}};
    ThreadPool pool(2);
    const Problem problem(shape, parts, {});
    run(problem.forward(), pool);
    Gradients again(problem, shape, parts, dtype), given(problem, shape, parts, dtype);
    backward_on_cpu(again.backward, pool);
    given.backward.out = problem.forward().out;
    given.backward.lse_with_sink = problem.forward().lse_with_sink;
    backward_on_cpu(given.backward, pool);
    EXPECT_EQ(given.all(), again.all());
    EXPECT_EQ(given.dsink, again.dsink);
    given.backward.lse_with_sink = nullptr;
    EXPECT_THROW(backward(given.backward, Backend::cpu, pool), Error);
  }
}

// Keys that only later rows see turn NaN: the rows before them, and the keys those see alone, keep their gradients.
TEST_F(CpuAttentionBackward, PoisonedKeysDoNotLeak) {
  for (const DType dtype : kStorages) {
    const Shape shape = shapes(dtype)[0];
    const std::vector<Part> parts = {{1, 100, 100}};
    ThreadPool pool(2);
    const Problem clean(shape, parts, {});
    Problem poisoned(shape, parts, {});
    for (std::int64_t j = 71; j < 100; ++j) {
      for (std::int64_t d = 0; d < shape.d_qk; ++d)
        poisoned.set_key(0, j, 0, d, std::numeric_limits<float>::quiet_NaN());
      for (std::int64_t d = 0; d < shape.d_v; ++d)
        poisoned.set_value(0, j, 0, d, std::numeric_limits<float>::infinity());
    }
    Gradients a(clean, shape, parts, DType::f32), b(poisoned, shape, parts, DType::f32);
    backward_on_cpu(a.backward, pool);
    backward_on_cpu(b.backward, pool);
    const auto rows = [&](const Gradients& g) {
      std::vector<double> all = g.of_sequence(0);
      all.resize(index(71 * shape.h_q * shape.d_qk));
      return all;
    };
    EXPECT_EQ(rows(a), rows(b));
  }
}

TEST_F(CpuAttentionBackward, RefusesWhatItHasNot) {
  Shape shape = shapes(DType::bf16)[0];
  const std::vector<Part> parts = {{0, 3, 5}};
  const Problem problem(shape, parts, {});
  ThreadPool pool(1);
  Gradients g(problem, shape, parts, DType::f64);
  EXPECT_THROW(backward(g.backward, Backend::cpu, pool), Error);
  EXPECT_EQ(backward(g.backward, Backend::automatic, pool).backend, "reference");
}

}  // namespace
}  // namespace basin::attention::cpu_tests
