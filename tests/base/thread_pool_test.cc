#include "basin/base/thread_pool.h"

#include <gmock/gmock.h>

#include <atomic>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "basin/base/error.h"

namespace basin {
namespace {

// All threads call one body: what it keeps between calls would be shared.
template <typename Body>
concept Accepted = requires(ThreadPool& pool, const Body& body) {
  pool.parallel_for(1, body);
};
using Constant = decltype([](std::int64_t, int) {});
using Mutable = decltype([n = 0](std::int64_t, int) mutable { return ++n; });
static_assert(Accepted<Constant> && !Accepted<Mutable>);

TEST(ThreadPool, EveryIndexRunsOnceForEverySize) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](std::int64_t i, int thread) {
        EXPECT_GE(thread, 0);
        EXPECT_LT(thread, threads);
        ++runs[static_cast<std::size_t>(i)];
      });
      for (const auto& run : runs) EXPECT_EQ(run, 1);
    }
  }
}

TEST(ThreadPool, ANegativeCountRunsNothing) {
  ThreadPool pool(2);
  pool.parallel_for(-1, [](std::int64_t, int) { FAIL(); });
}

TEST(ThreadPool, ThreadNumbersAreNotSharedAtOneTime) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  pool.parallel_for(2000, [&](std::int64_t, int thread) {
    EXPECT_EQ(++inside[static_cast<std::size_t>(thread)], 1);
    --inside[static_cast<std::size_t>(thread)];
  });
}

TEST(ThreadPool, AnExceptionReachesTheCallerAndThePoolStaysUsable) {
  ThreadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool.parallel_for(100,
                                   [&](std::int64_t i, int) {
                                     if (i == 17) throw Error(ErrorCode::internal, "17");
                                   }),
                 Error);
    std::atomic<std::int64_t> sum = 0;
    pool.parallel_for(100, [&](std::int64_t i, int) { sum += i; });
    EXPECT_EQ(sum, 4950);
  }
}

TEST(ThreadPool, WhenEveryBodyThrowsOneArrives) {
  ThreadPool pool(4);
  EXPECT_THROW(pool.parallel_for(64, [](std::int64_t, int) { throw std::runtime_error("all"); }),
               std::runtime_error);
}

TEST(ThreadPool, NestedCallsRunOnTheSameThread) {
  ThreadPool pool(4), other(2);
  std::atomic<int> total = 0;
  pool.parallel_for(16, [&](std::int64_t, int thread) {
    const auto here = std::this_thread::get_id();
    pool.parallel_for(5, [&](std::int64_t, int inner) {
      EXPECT_EQ(std::this_thread::get_id(), here);
      EXPECT_EQ(inner, thread);
      ++total;
    });
  });
  EXPECT_EQ(total, 80);
}

TEST(ThreadPool, ManyShortRuns) {
  ThreadPool pool(3);
  std::int64_t total = 0;
  for (int round = 0; round < 5000; ++round) {
    std::atomic<std::int64_t> sum = 0;
    pool.parallel_for(4, [&](std::int64_t i, int) { sum += i + 1; });
    total += sum;
  }
  EXPECT_EQ(total, 50000);
}

TEST(ThreadPool, SizesOutsideTheRangeAreRefused) {
  for (const int threads : {-1, 1025}) {
    try {
      ThreadPool pool(threads);
      FAIL() << threads;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), testing::HasSubstr(std::to_string(threads)));
    }
  }
  EXPECT_GE(ThreadPool(0).threads(), 1);
}

}  // namespace
}  // namespace basin
