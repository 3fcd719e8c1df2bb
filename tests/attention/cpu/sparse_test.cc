// Attention over selected keys: the bits of the dense path under the mask that shows the same keys, and the reference elsewhere.
#include "basin/attention/sparse.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "attention/cpu/fixture.h"
#include "attention/cpu/problem.h"
#include "basin/attention/mask.h"
#include "basin/attention/reference.h"
#include "basin/base/error.h"

namespace basin::attention::cpu_tests {
namespace {

using Bits = std::vector<std::vector<std::uint32_t>>;

constexpr DType kStorages[] = {DType::f32, DType::f16, DType::bf16};

// Rows of indices for every row of q, filled by a rule on (position of the query, key).
struct Rows {
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> lengths;
  std::int64_t topk = 0;

  Selection selection() const { return {indices.data(), topk, lengths.empty() ? nullptr : lengths.data()}; }
  std::int32_t* row(std::int64_t number) { return indices.data() + number * topk; }
};

template <typename Rule>
Rows select_by(const Forward& p, std::int64_t topk, const Rule& rule) {
  Rows rows;
  rows.topk = topk;
  rows.indices.assign(static_cast<std::size_t>(p.q.shape[0] * topk), -1);
  for (const Sequence& sequence : p.sequences) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      std::int32_t* to = rows.row(sequence.q_begin + i);
      for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
        if (rule(query_position(sequence, i), j)) *to++ = static_cast<std::int32_t>(j);
      }
    }
  }
  return rows;
}

class CpuSparse : public CpuTest {
 protected:
  ThreadPool one_{1}, two_{2};

  void run(const Forward& problem, const Selection& selection, ThreadPool& pool) {
    const Ran ran = attention::forward(problem, selection, Backend::cpu, pool);
    ASSERT_EQ(ran.backend, "cpu");
    ASSERT_EQ(ran.target, cpu::target_name());
  }

  static std::vector<Shape> shapes(DType dtype) {
    std::vector<Shape> result(8);
    result[1].h_q = 70;  // two passes, the second of them not full
    result[1].h_kv = 1;
    result[1].sink_logit.assign(70, 0.5f);
    result[2].spec.mask = {.window = 90, .sink_tokens = 5};
    result[2].q_sink = true;
    result[3].spec.softcap = 2.0;
    result[3].spec.mask = {.window = 300, .sink_tokens = 70};
    result[4].spec.mask = {.causal = false, .window = 40, .window_right = 9};
    result[5].h_q = 16;  // the most heads whose keys lie in lanes, and one more
    result[5].h_kv = 2;
    result[5].spec.mask = {.window = 90, .sink_tokens = 70};
    result[5].q_sink = true;
    result[6].h_q = 9;
    result[6].h_kv = 1;
    result[7].value_scale = 0x1p-123f;  // whose products with probabilities are subnormal numbers
    for (Shape& shape : result) {
      shape.dtype = dtype;
      shape.d_qk = 48;
      shape.d_v = 32;
      shape.spread = 4.0f;
    }
    return result;
  }
};

TEST_F(CpuSparse, WithoutASelectionTheBitsAreThoseOfTheDensePath) {
  const std::vector<Part> parts = {{3, 40, 1500}, {4, 9, 9}, {5, 1, 2100}, {6, 0, 3}};
  for (const DType dtype : kStorages) {
    for (const Shape& shape : shapes(dtype)) {
      for (const Layout& layout : {Layout{}, Layout{16, true}}) {
        Problem dense(shape, parts, layout), sparse(shape, parts, layout);
        CpuTest::run(dense.forward(), two_);
        run(sparse.forward(), {}, two_);
        EXPECT_EQ(dense.bits(), sparse.bits());
        EXPECT_TRUE(sparse.sentinels_intact());
      }
    }
  }
}

TEST_F(CpuSparse, ASelectionOfAWindowHasTheBitsOfItsMask) {
  const std::vector<Part> parts = {{3, 30, 1300}, {4, 1, 70}};
  for (const DType dtype : kStorages) {
    Shape windowed, whole;
    windowed.spec.mask = {.window = 50, .sink_tokens = 7};
    for (Shape* shape : {&windowed, &whole}) {
      shape->dtype = dtype;
      shape->h_q = 12;
      shape->h_kv = 1;
    }
    Problem dense(windowed, parts, {16, false}), sparse(whole, parts, {});
    CpuTest::run(dense.forward(), two_);
    const Mask mask = windowed.spec.mask;
    const Rows rows = select_by(sparse.forward(), 57, [&](auto p, auto j) { return visible(mask, p, j); });
    run(sparse.forward(), rows.selection(), two_);
    EXPECT_EQ(dense.bits(), sparse.bits());
  }
}

TEST_F(CpuSparse, OrderGapsAndWhatStandsBehindTheLengthDoNotMatter) {
  const std::vector<Part> parts = {{3, 20, 900}};
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    shape.sink_logit.assign(6, 1.0f);
    const auto rule = [](std::int64_t p, std::int64_t j) { return j <= p && (j * 7 + p) % 13 == 0; };
    Problem plain(shape, parts, {});
    Rows rows = select_by(plain.forward(), 120, rule);
    run(plain.forward(), rows.selection(), two_);
    std::mt19937 random(5);
    for (int replay = 0; replay < 5; ++replay) {
      Problem again(shape, parts, {16, true});
      Rows mixed = select_by(again.forward(), 120, rule);
      for (std::int64_t row = 0; row < again.forward().q.shape[0]; ++row) {
        std::shuffle(mixed.row(row), mixed.row(row) + 100, random);
        if (replay % 2 == 0) std::swap(*mixed.row(row), *(mixed.row(row) + 99));  // -1 in front
        // Valid, invalid and double entries that do not count.
        for (int i = 100; i < 120; ++i) mixed.row(row)[i] = i % 3 == 0 ? 5 : i % 3 == 1 ? 1 << 30 : -7;
        mixed.lengths.push_back(100);
      }
      run(again.forward(), mixed.selection(), replay % 2 == 0 ? one_ : two_);
      ASSERT_EQ(plain.bits(), again.bits()) << replay;
    }
  }
}

TEST_F(CpuSparse, EqualsTheReferenceOnScatteredKeys) {
  struct Case {
    std::int64_t h_q, h_kv, d_qk, d_v;
  };
  for (const DType dtype : kStorages) {
    for (const Case& c :
         {Case{16, 1, 576, 512}, Case{5, 5, 192, 128}, Case{8, 2, 64, 64}, Case{1, 1, 16, 16}}) {
      Shape shape;
      shape.dtype = dtype;
      shape.h_q = c.h_q;
      shape.h_kv = c.h_kv;
      shape.d_qk = c.d_qk;
      shape.d_v = c.d_v;
      shape.sink_logit.assign(static_cast<std::size_t>(c.h_q), -0.5f);
      const std::vector<Part> parts = {{3, 3, 2500}, {5, 4, 40}};
      Problem got(shape, parts, {64, false}), want(shape, parts, {}), yardstick(shape, parts, {});
      const auto rule = [](std::int64_t p, std::int64_t j) { return j <= p && (j * j + p) % 11 == 0; };
      const Rows rows = select_by(got.forward(), 600, rule);
      run(got.forward(), rows.selection(), two_);
      reference::forward(want.forward(), rows.selection());
      reference::forward(yardstick.forward(), rows.selection(), reference::Precision::storage);
      const Difference error = difference(got, want), allowed = difference(yardstick, want);
      EXPECT_LE(error.rms, 2 * allowed.rms + 0x1p-22) << c.d_qk;
      EXPECT_LE(error.largest, 3 * allowed.largest + 0x1p-21) << c.d_qk;
    }
  }
}

TEST_F(CpuSparse, RowsWithoutKeysAreZeroAndTheirSinkStays) {
  Shape shape;
  shape.sink_logit.assign(6, 2.0f);
  Problem problem(shape, {{3, 4, 100}}, {});
  Rows rows = select_by(problem.forward(), 8, [](auto, auto) { return false; });
  rows.row(1)[7] = 3;   // one row has a key, the last entry
  rows.row(2)[0] = 99;  // after the query: selected, but not visible
  run(problem.forward(), rows.selection(), two_);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const std::int64_t row : {0, 2, 3}) {
    EXPECT_EQ(problem.out(row, 0, 5), 0.0f);
    EXPECT_EQ(problem.lse(row, 0), -kInf);
    EXPECT_EQ(problem.lse_with_sink(row, 0), 2.0f);
  }
  EXPECT_NE(problem.out(1, 0, 5), 0.0f);
  EXPECT_GT(problem.lse(1, 0), -kInf);
}

TEST_F(CpuSparse, KeysThatAreNotSelectedAreNotRead) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    const std::vector<Part> parts = {{3, 2, 700}};
    const auto rule = [](std::int64_t, std::int64_t j) { return j % 64 == 63 || j == 130; };
    Problem clean(shape, parts, {}), dirty(shape, parts, {});
    const Rows rows = select_by(clean.forward(), 16, rule);
    for (std::int64_t j = 0; j < 700; ++j) {
      if (rule(0, j)) continue;
      for (std::int64_t h = 0; h < shape.h_kv; ++h) {
        dirty.set_key(0, j, h, 3, kNan);
        dirty.set_value(0, j, h, 5, kNan);
      }
    }
    run(clean.forward(), rows.selection(), two_);
    run(dirty.forward(), rows.selection(), two_);
    EXPECT_EQ(clean.bits(), dirty.bits());
    // A NaN that is selected shows, in its head group and row only.
    dirty.set_key(0, 130, 0, 0, kNan);
    run(dirty.forward(), rows.selection(), two_);
    EXPECT_TRUE(std::isnan(dirty.out(1, 0, 0)));
    EXPECT_EQ(clean.bits()[1][5 * 66], dirty.bits()[1][5 * 66]);
  }
}

TEST_F(CpuSparse, RefusesBadRowsByNameBeforeAnythingIsWritten) {
  using testing::HasSubstr;
  Shape shape;
  struct Case {
    std::int32_t bad;
    const char* says;
  };
  for (const Case& c : {Case{100, "row 2: key 100 of 100"}, Case{-2, "row 2: key -2 of 100"},
                        Case{4, "row 2: key 4 twice"}}) {
    Problem problem(shape, {{3, 4, 100}}, {});
    const Bits before = problem.bits();
    Rows rows = select_by(problem.forward(), 8, [](auto, auto j) { return j >= 4 && j < 8; });
    rows.row(2)[6] = c.bad;
    try {
      attention::forward(problem.forward(), rows.selection(), Backend::automatic, two_);
      ADD_FAILURE() << c.says;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), HasSubstr(c.says));
    }
    EXPECT_EQ(problem.bits(), before);
    rows.lengths.assign(4, 6);  // the bad entry does not count
    run(problem.forward(), rows.selection(), two_);
    rows.lengths[1] = 9;
    EXPECT_THROW(attention::forward(problem.forward(), rows.selection(), Backend::automatic, two_), Error);
  }
  shape.d_qk = 592;
  Problem wide(shape, {{3, 1, 10}}, {});
  EXPECT_THROW(attention::forward(wide.forward(), Selection{}, Backend::cpu, two_), Error);
  EXPECT_EQ(attention::forward(wide.forward(), Selection{}, Backend::automatic, two_).backend, "reference");
}

}  // namespace
}  // namespace basin::attention::cpu_tests
