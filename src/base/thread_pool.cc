#include "basin/base/thread_pool.h"

#include <fmt/format.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "basin/base/error.h"

namespace basin {
namespace {

// Set while a thread runs a body, so that a nested parallel_for runs serially instead of waiting for itself.
thread_local bool inside_body = false;
thread_local int current_thread = 0;

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

// How long a thread looks for work, or for the end of work, before it sleeps: about 50 us. A decode step is a hundred
// products of some ten microseconds each, and waking a sleeping thread costs as much as one of them.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <typename Done>
bool spin_until(const Done& done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
    pause();
  }
  return false;
}

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;  // of the two conditions and of `error`
  std::condition_variable start;
  std::condition_variable done;
  std::atomic<std::uint64_t> generation{0};  // counts parallel_for calls; a worker runs once per generation
  std::atomic<bool> stopping{false};
  std::atomic<int> running{0};  // workers that have not finished this generation

  // Written before `generation` changes, read after.
  const std::function<void(std::int64_t, int)>* body = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;

  std::vector<std::jthread> workers;

  void work(int thread) {
    inside_body = true;
    current_thread = thread;
    for (;;) {
      const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) break;
      try {
        (*body)(index, thread);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
    inside_body = false;
    current_thread = 0;
  }

  void serve(int thread) {
    std::uint64_t seen = 0;
    const auto called = [&] { return stopping.load() || generation.load() != seen; };
    for (;;) {
      if (!spin_until(called)) {
        std::unique_lock lock(mutex);
        start.wait(lock, called);
      }
      if (stopping.load()) return;
      seen = generation.load();
      work(thread);
      if (running.fetch_sub(1) == 1) {
        const std::lock_guard lock(mutex);  // the caller is either before its check or asleep
        done.notify_one();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  constexpr int kMaxThreads = 1024;
  if (threads < 0 || threads > kMaxThreads) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} threads were asked for; allowed are 1 to {}, or 0 for one per core", threads,
                            kMaxThreads));
  }
  if (threads == 0) threads = available_cores();
  for (int thread = 1; thread < threads; ++thread) {
    state_->workers.emplace_back([state = state_.get(), thread] { state->serve(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping.store(true);
  }
  state_->start.notify_all();
  state_->workers.clear();  // joins
}

int ThreadPool::threads() const {
  return static_cast<int>(state_->workers.size()) + 1;
}

void ThreadPool::run(std::int64_t count, const std::function<void(std::int64_t, int)>& body) {
  if (count <= 0) return;
  if (inside_body || count == 1 || state_->workers.empty()) {
    for (std::int64_t index = 0; index < count; ++index) body(index, current_thread);
    return;
  }
  State& s = *state_;
  s.body = &body;
  s.count = count;
  s.next.store(0, std::memory_order_relaxed);
  s.error = nullptr;
  s.running.store(static_cast<int>(s.workers.size()));
  {
    const std::lock_guard lock(s.mutex);
    s.generation.fetch_add(1);
  }
  s.start.notify_all();
  s.work(0);
  const auto finished = [&] { return s.running.load() == 0; };
  if (!spin_until(finished)) {
    std::unique_lock lock(s.mutex);
    s.done.wait(lock, finished);
  }
  if (s.error) std::rethrow_exception(s.error);
}

}  // namespace basin
