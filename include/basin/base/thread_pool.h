// A fixed set of threads that run one index range at a time.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>

namespace basin {

class ThreadPool {
 public:
  /// `threads` >= 1 counts the calling thread; 0 means one per available core. Throws Error(invalid_argument).
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  /// Calls body(index, thread) once for every index in [0, count), 0 <= thread < threads(), and returns when
  /// all are done. Indices are handed out dynamically in ascending order; which thread gets which is not
  /// defined, so results must not depend on it. The first exception thrown by a body is rethrown here, after
  /// the remaining indices have been dropped. Calls from inside a body run serially on that thread.
  /// All threads call the one body, so it must be callable as const: a mutable lambda does not compile.
  template <typename Body>
  requires std::invocable<const Body&, std::int64_t, int>
  void parallel_for(std::int64_t count, const Body& body) { run(count, std::cref(body)); }

 private:
  void run(std::int64_t count, const std::function<void(std::int64_t index, int thread)>& body);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace basin
