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

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable start;
  std::condition_variable done;
  std::uint64_t generation = 0;  // counts parallel_for calls; a worker runs once per generation
  bool stopping = false;
  int running = 0;  // workers that have not finished this generation

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
    for (;;) {
      {
        std::unique_lock lock(mutex);
        start.wait(lock, [&] { return stopping || generation != seen; });
        if (stopping) return;
        seen = generation;
      }
      work(thread);
      const std::lock_guard lock(mutex);
      if (--running == 0) done.notify_one();
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
    state_->stopping = true;
  }
  state_->start.notify_all();
  state_->workers.clear();  // joins
}

int ThreadPool::threads() const {
  return static_cast<int>(state_->workers.size()) + 1;
}

void ThreadPool::parallel_for(std::int64_t count, const std::function<void(std::int64_t, int)>& body) {
  if (count <= 0) return;
  if (inside_body || count == 1 || state_->workers.empty()) {
    for (std::int64_t index = 0; index < count; ++index) body(index, current_thread);
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->count = count;
    state_->next.store(0, std::memory_order_relaxed);
    state_->error = nullptr;
    state_->running = static_cast<int>(state_->workers.size());
    ++state_->generation;
  }
  state_->start.notify_all();
  state_->work(0);
  std::unique_lock lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->running == 0; });
  if (state_->error) std::rethrow_exception(state_->error);
}

}  // namespace basin
