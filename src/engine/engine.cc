#include "engine/engine.h"

#include <chrono>
#include <utility>

namespace basin::engine {
namespace {

std::int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

BatchOptions with_clock(BatchOptions options) {
  options.now_us = now_us;
  return options;
}

}  // namespace

Engine::Engine(Runner& runner, ThreadPool& threads, const text::Tokenizer* tokenizer,
               const EngineOptions& options)
    : batch_(runner, threads, tokenizer, with_clock(options.batch)),
      max_choices_(options.max_waiting + options.batch.max_sequences),
      max_tokens_(options.max_waiting_tokens) {
  metrics_ = batch_.metrics();
  thread_ = std::jthread([this] { loop(); });
}

void Engine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = cancel_all_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::optional<std::uint64_t> Engine::submit(Request request) {
  batch_.check(request);
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    std::int64_t choices = choices_ + request.choices, tokens = tokens_ + request.waiting_tokens();
    for (const Arrived& other : arrived_) {
      choices += other.request.choices;
      tokens += other.request.waiting_tokens();
    }
    if (choices > max_choices_ || tokens > max_tokens_) return {};
    id = next_id_++;
    arrived_.push_back({id, std::move(request), now_us()});
    idle_ = false;
  }
  wake_.notify_one();
  return id;
}

void Engine::cancel(std::uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    cancelled_.push_back(id);
  }
  wake_.notify_one();
}

void Engine::cancel_all() {
  {
    const std::lock_guard lock(mutex_);
    cancel_all_ = true;
  }
  wake_.notify_one();
}

void Engine::clear_prefix_cache() {
  {
    const std::lock_guard lock(mutex_);
    clear_ = true;
  }
  wake_.notify_one();
}

Metrics Engine::metrics() const {
  const std::lock_guard lock(mutex_);
  return metrics_;
}

bool Engine::idle() const {
  const std::lock_guard lock(mutex_);
  return idle_;
}

void Engine::loop() {
  for (;;) {
    std::vector<Arrived> arrived;
    std::vector<std::uint64_t> cancelled;
    bool clear = false, cancel_all = false;
    {
      std::unique_lock lock(mutex_);
      const auto has_work = [&] {
        return stopping_ || clear_ || cancel_all_ || !arrived_.empty() || !cancelled_.empty() ||
               !batch_.empty();
      };
      wake_.wait(lock, has_work);
      if (stopping_ && batch_.empty() && arrived_.empty()) return;
      arrived = std::exchange(arrived_, {});
      cancelled = std::exchange(cancelled_, {});
      clear = std::exchange(clear_, false);
      cancel_all = std::exchange(cancel_all_, false);
      for (const Arrived& one : arrived) {
        choices_ += one.request.choices;
        tokens_ += one.request.waiting_tokens();
      }
    }
    try {
      for (Arrived& one : arrived) batch_.add(one.id, std::move(one.request), one.at_us);
      for (const std::uint64_t id : cancelled) batch_.cancel(id);
      if (cancel_all) batch_.cancel_all();
      if (clear) batch_.clear_prefix_cache();
      if (!batch_.empty()) batch_.step();
    } catch (const std::exception& error) {  // the next requests may fare better
      batch_.fail_all({ErrorCode::internal, error.what()});
    }
    const std::lock_guard lock(mutex_);
    metrics_ = batch_.metrics();
    choices_ = metrics_.waiting + metrics_.running;
    tokens_ = batch_.prompt_tokens();
    idle_ = batch_.empty() && arrived_.empty();
  }
}

}  // namespace basin::engine
