// Numbered tasks dealt out to threads in runs of neighbours, so that what a thread reads lies together in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace basin::ops {

/// [0, tasks) in one run for each thread. Who has finished its own takes the second half of the longest run that is left.
class TaskRuns {
 public:
  /// tasks < 2^32, threads >= 1.
  TaskRuns(std::int64_t tasks, int threads)
      : threads_(threads), runs_(std::make_unique<Run[]>(static_cast<std::size_t>(threads))) {
    for (int thread = 0; thread < threads; ++thread)
      run(thread).store(pack(first(tasks, thread, threads), first(tasks, thread + 1, threads)),
                        std::memory_order_relaxed);
  }

  /// Where the run of a thread begins.
  static std::int64_t first(std::int64_t tasks, int thread, int threads) { return tasks * thread / threads; }

  /// The next task of this thread. Each number is given once; nothing means that all have been.
  std::optional<std::int64_t> take(int thread) {
    do {
      std::uint64_t own = run(thread).load(std::memory_order_relaxed);
      while (begin(own) < end(own)) {
        if (run(thread).compare_exchange_weak(own, pack(begin(own) + 1, end(own)), std::memory_order_relaxed))
          return begin(own);
      }
    } while (steal(thread));
    return std::nullopt;
  }

 private:
  struct alignas(64) Run {
    std::atomic<std::uint64_t> bounds{0};
  };

  static std::uint64_t pack(std::int64_t begin, std::int64_t end) {
    return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
  }
  static std::int64_t begin(std::uint64_t bounds) { return static_cast<std::int64_t>(bounds >> 32); }
  static std::int64_t end(std::uint64_t bounds) { return static_cast<std::int64_t>(bounds & 0xffffffffu); }

  std::atomic<std::uint64_t>& run(int thread) { return runs_[static_cast<std::size_t>(thread)].bounds; }

  // Makes the second half of another run this thread's own; false when all are empty.
  bool steal(int thread) {
    for (;;) {
      int victim = -1;
      std::uint64_t longest = 0;
      for (int other = 0; other < threads_; ++other) {
        const std::uint64_t bounds = run(other).load(std::memory_order_relaxed);
        if (end(bounds) - begin(bounds) > end(longest) - begin(longest)) {
          victim = other;
          longest = bounds;
        }
      }
      if (victim < 0) return false;
      const std::int64_t middle = begin(longest) + (end(longest) - begin(longest)) / 2;
      if (!run(victim).compare_exchange_strong(longest, pack(begin(longest), middle),
                                               std::memory_order_relaxed))
        continue;
      run(thread).store(pack(middle, end(longest)), std::memory_order_relaxed);
      return true;
    }
  }

  int threads_;
  std::unique_ptr<Run[]> runs_;
};

}  // namespace basin::ops
