// The indexer: against the reference, and the same selection in every chunking, paging, batch and number of threads.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

#include "attention/cpu/fixture.h"
#include "basin/attention/sparse.h"
#include "basin/attention/support.h"
#include "basin/base/error.h"

namespace basin::attention::cpu_tests {
namespace {

// An indexer over `tokens` keys of one sequence, whose queries are the last so many.
class Problem {
 public:
  Problem(DType dtype, std::int64_t heads, std::int64_t d, std::int64_t tokens, std::int64_t page_tokens = 0)
      : dtype_(dtype), heads_(heads), d_(d), tokens_(tokens) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (float& value : values) value = std::round(normal(random) * 16.0f) / 16.0f;  // exact in every dtype
    };
    fill(q, tokens * heads * d);
    fill(q_sink, tokens * heads * d);
    fill(k, tokens * d);
    fill(weights, tokens * heads);
    page_tokens_ = page_tokens;
  }

  std::vector<float> q, q_sink, k, weights;
  Mask mask;
  std::int64_t topk = 24, forced_first = 0, forced_last = 0;
  bool second_query = false;

  /// Selections of queries [first, end), the last keys being those of `end` - 1.
  std::vector<std::vector<std::int32_t>> select(std::int64_t first, std::int64_t end, Backend backend,
                                                ThreadPool& pool) const {
    const std::vector<std::byte> q_bytes = stored(q, first * heads_ * d_, end * heads_ * d_);
    const std::vector<std::byte> sink_bytes = stored(q_sink, first * heads_ * d_, end * heads_ * d_);
    std::vector<std::byte> k_bytes = stored(k, 0, end * d_);
    Sequence sequence;
    sequence.q_tokens = end - first;
    sequence.kv_tokens = end;
    Indexer p;
    p.mask = mask;
    p.sequences = {&sequence, 1};
    p.q = contiguous(static_cast<const void*>(q_bytes.data()), dtype_, {end - first, heads_, d_});
    if (second_query)
      p.q_sink = contiguous(static_cast<const void*>(sink_bytes.data()), dtype_, {end - first, heads_, d_});
    p.k = contiguous(static_cast<const void*>(k_bytes.data()), dtype_, {end, 1, d_});
    std::vector<std::int32_t> pages;
    std::vector<std::byte> paged;
    if (page_tokens_ > 0) {  // back to front
      const std::int64_t count = (end + page_tokens_ - 1) / page_tokens_;
      const std::int64_t bytes = page_tokens_ * d_ * block_bytes(dtype_);
      paged.assign(static_cast<std::size_t>(count * bytes), std::byte{0xff});
      k_bytes.resize(static_cast<std::size_t>(count * bytes), std::byte{0xff});
      for (std::int64_t n = 0; n < count; ++n) {
        pages.push_back(static_cast<std::int32_t>(count - 1 - n));
        std::copy_n(k_bytes.data() + n * bytes, bytes, paged.data() + (count - 1 - n) * bytes);
      }
      sequence.pages = pages.data();
      p.k = contiguous(static_cast<const void*>(paged.data()), dtype_, {count, page_tokens_, 1, d_});
    }
    p.weights = weights.data() + first * heads_;
    p.topk = topk;
    p.forced_first = forced_first;
    p.forced_last = forced_last;
    std::vector<std::int32_t> indices(static_cast<std::size_t>((end - first) * topk), -5);
    p.indices = indices.data();
    attention::select(p, backend, pool);
    std::vector<std::vector<std::int32_t>> rows;
    for (std::int64_t i = 0; i < end - first; ++i)
      rows.emplace_back(indices.begin() + i * topk, indices.begin() + (i + 1) * topk);
    return rows;
  }

  std::vector<std::vector<std::int32_t>> in_chunks(std::int64_t chunk, ThreadPool& pool) const {
    std::vector<std::vector<std::int32_t>> rows;
    for (std::int64_t begin = 0; begin < tokens_; begin += chunk) {
      for (auto& row : select(begin, std::min(begin + chunk, tokens_), Backend::cpu, pool))
        rows.push_back(std::move(row));
    }
    return rows;
  }

 private:
  std::vector<std::byte> stored(const std::vector<float>& from, std::int64_t begin, std::int64_t end) const {
    std::vector<std::byte> to(static_cast<std::size_t>((end - begin) * block_bytes(dtype_)));
    for (std::int64_t i = begin; i < end; ++i) {
      const float value = from[static_cast<std::size_t>(i)];
      switch (dtype_) {
        case DType::f16:
          reinterpret_cast<f16*>(to.data())[i - begin] = to_f16(value);
          break;
        case DType::bf16:
          reinterpret_cast<bf16*>(to.data())[i - begin] = to_bf16(value);
          break;
        default:
          reinterpret_cast<float*>(to.data())[i - begin] = value;
      }
    }
    return to;
  }

  DType dtype_;
  std::int64_t heads_, d_, tokens_, page_tokens_ = 0;
};

class CpuIndexer : public CpuTest {
 protected:
  ThreadPool one_{1}, two_{2};
};

TEST_F(CpuIndexer, EqualsTheReference) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t heads : {1, 4, 13}) {
      Problem problem(dtype, heads, 32, 300, heads == 4 ? 16 : 0);
      for (const Mask& mask :
           {Mask{}, Mask{.window = 90, .sink_tokens = 5}, Mask{.window = 64, .sink_tokens = 70}}) {
        for (const bool second : {false, true}) {
          problem.mask = mask;
          problem.second_query = second;
          // Products of multiples of 1/16 add up without rounding, so even ties are those of the reference.
          EXPECT_EQ(problem.select(0, 300, Backend::cpu, two_),
                    problem.select(0, 300, Backend::reference, two_))
              << heads;
        }
      }
    }
  }
}

TEST_F(CpuIndexer, ChunksPagesAndThreadsDoNotChangeASelection) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Problem plain(dtype, 6, 64, 700), paged(dtype, 6, 64, 700, 16);
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    for (auto values : {&Problem::q, &Problem::k, &Problem::weights}) {
      for (float& value : plain.*values) value = normal(random);
      paged.*values = plain.*values;
    }
    const auto whole = plain.select(0, 700, Backend::cpu, two_);
    EXPECT_EQ(whole, plain.in_chunks(1, one_));
    EXPECT_EQ(whole, plain.in_chunks(7, two_));
    EXPECT_EQ(whole, paged.in_chunks(64, two_));
    EXPECT_EQ(whole, paged.select(0, 700, Backend::cpu, one_));
  }
}

TEST_F(CpuIndexer, SelectsEverythingUntilThereIsMore) {
  Problem problem(DType::f32, 2, 16, 60);
  problem.topk = 24;
  const auto rows = problem.select(0, 60, Backend::cpu, two_);
  for (std::int64_t t = 0; t < 60; ++t) {
    const auto& row = rows[static_cast<std::size_t>(t)];
    for (std::int64_t i = 0; i < 24 && t < 24; ++i)
      ASSERT_EQ(row[static_cast<std::size_t>(i)], i <= t ? i : -1);
    EXPECT_TRUE(std::is_sorted(row.begin(), row.begin() + std::min<std::int64_t>(t + 1, 24)));
    EXPECT_LE(*std::max_element(row.begin(), row.end()), t);
  }
}

// A key with no positive product scores exactly 0, and of equal scores the first are taken.
TEST_F(CpuIndexer, NegativeProductsScoreZero) {
  Problem problem(DType::f32, 3, 16, 100);
  problem.topk = 4;
  std::fill(problem.q.begin(), problem.q.end(), 1.0f);
  std::fill(problem.weights.begin(), problem.weights.end(), 1.0f);
  for (std::int64_t j = 0; j < 100; ++j) {
    const bool good = j == 40 || j == 90;
    std::fill_n(problem.k.begin() + j * 16, 16, good ? 0.25f : j == 7 ? 0.0f : -0.5f);
  }
  EXPECT_EQ(problem.select(99, 100, Backend::cpu, two_).front(), (std::vector<std::int32_t>{0, 1, 40, 90}));
  // A negative weight makes the good keys the worst.
  std::fill(problem.weights.begin(), problem.weights.end(), -1.0f);
  EXPECT_EQ(problem.select(99, 100, Backend::cpu, two_).front(), (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST_F(CpuIndexer, ForcedKeysTakePlacesOfTheSelection) {
  Problem problem(DType::f32, 3, 32, 400);
  problem.topk = 20;
  const auto free = problem.select(0, 400, Backend::cpu, two_);
  problem.forced_first = 4;
  problem.forced_last = 6;
  const auto rows = problem.select(0, 400, Backend::cpu, two_);
  EXPECT_EQ(rows, problem.select(0, 400, Backend::reference, two_));
  EXPECT_NE(rows, free);
  for (std::size_t t = 30; t < 400; ++t) {
    ASSERT_EQ(std::vector<std::int32_t>(rows[t].begin(), rows[t].begin() + 4),
              (std::vector<std::int32_t>{0, 1, 2, 3}));
    for (int i = 0; i < 6; ++i)
      ASSERT_EQ(rows[t][static_cast<std::size_t>(19 - i)], static_cast<std::int32_t>(t) - i);
  }
  problem.forced_last = 17;
  EXPECT_THROW(problem.select(0, 400, Backend::cpu, two_), Error);
  problem.mask = {.window = 100, .sink_tokens = 8};
  problem.forced_last = 6;
  EXPECT_EQ(problem.select(0, 400, Backend::cpu, two_), problem.select(0, 400, Backend::reference, two_));
}

TEST_F(CpuIndexer, RefusesNanAndHeadsOfKeys) {
  Problem problem(DType::f32, 2, 16, 100);
  problem.k[50 * 16] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NO_THROW(problem.select(0, 50, Backend::cpu, two_));
  for (const Backend backend : {Backend::cpu, Backend::reference})
    EXPECT_THROW(problem.select(0, 100, backend, two_), Error);
  problem.topk = 0;
  EXPECT_THROW(problem.select(0, 50, Backend::cpu, two_), Error);
}

}  // namespace
}  // namespace basin::attention::cpu_tests
