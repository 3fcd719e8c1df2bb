// Every task is given once, to its own thread first, in runs of neighbours.
#include "ops/task_runs.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace basin::ops {
namespace {

std::vector<std::int64_t> all_of(TaskRuns& runs, int thread) {
  std::vector<std::int64_t> taken;
  while (const auto task = runs.take(thread)) taken.push_back(*task);
  return taken;
}

TEST(TaskRuns, OneThreadTakesAllInOrder) {
  TaskRuns runs(5, 1);
  EXPECT_EQ(all_of(runs, 0), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(runs.take(0), std::nullopt);
}

TEST(TaskRuns, WhoHasFinishedTakesTheSecondHalfOfAnother) {
  TaskRuns runs(16, 2);
  EXPECT_EQ(runs.take(1), 8);
  // Its own 0 to 7, then half of 9 to 15, and so on: towards what the other takes next.
  EXPECT_EQ(all_of(runs, 0), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 10, 11, 9}));
  EXPECT_EQ(runs.take(1), std::nullopt);
}

TEST(TaskRuns, FewerTasksThanThreadsAndNone) {
  TaskRuns few(2, 5), none(0, 3);
  EXPECT_EQ(all_of(few, 4).size(), 2u);
  EXPECT_EQ(none.take(2), std::nullopt);
  for (const std::int64_t tasks : {0, 1, 2, 7, 100}) {
    EXPECT_EQ(TaskRuns::first(tasks, 0, 4), 0);
    EXPECT_EQ(TaskRuns::first(tasks, 4, 4), tasks);
  }
}

TEST(TaskRuns, EveryTaskOnceForManyThreads) {
  constexpr int kThreads = 4;
  constexpr std::int64_t kTasks = 20000;
  for (int repeat = 0; repeat < 5; ++repeat) {
    TaskRuns runs(kTasks, kThreads);
    std::vector<std::atomic<int>> times(kTasks);
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        while (const auto task = runs.take(thread)) times[static_cast<std::size_t>(*task)].fetch_add(1);
      });
    }
    threads.clear();
    for (const std::atomic<int>& count : times) ASSERT_EQ(count.load(), 1);
  }
}

}  // namespace
}  // namespace basin::ops
