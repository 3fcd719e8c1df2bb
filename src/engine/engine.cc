#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "basin/base/error.h"

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

std::optional<std::vector<std::uint64_t>> Engine::submit(std::vector<Request> requests) {
  std::int64_t choices = 0, tokens = 0;
  for (const Request& request : requests) {
    batch_.check(request);
    if (request.choices > max_choices_) {
      throw Error(ErrorCode::invalid_argument, fmt::format("{} choices of one prompt, and {} may wait or run",
                                                           request.choices, max_choices_));
    }
    choices += request.choices;
    tokens += request.waiting_tokens();
  }
  std::vector<std::uint64_t> ids;
  ids.reserve(requests.size());
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t first = requests.empty() ? 0 : requests.front().choices;
    if (tokens_ + tokens > max_tokens_ || choices_ + first > max_choices_) return {};
    arrived_.reserve(arrived_.size() + requests.size());
    const std::int64_t at_us = now_us();
    for (Request& request : requests) {
      ids.push_back(next_id_++);
      arrived_.push_back({ids.back(), std::move(request), at_us});
    }
    choices_ += choices;
    tokens_ += tokens;
    idle_ = false;
  }
  wake_.notify_one();
  return ids;
}

std::optional<std::uint64_t> Engine::submit(Request request) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  const auto ids = submit(std::move(one));
  if (!ids) return {};
  return ids->front();
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
               !batch_.empty() || !later_.empty();
      };
      wake_.wait(lock, has_work);
      if (stopping_ && batch_.empty() && arrived_.empty() && later_.empty()) return;
      arrived = std::exchange(arrived_, {});
      cancelled = std::exchange(cancelled_, {});
      clear = std::exchange(clear_, false);
      cancel_all = std::exchange(cancel_all_, false);
    }
    try {
      for (Arrived& one : arrived) later_.push_back(std::move(one));
      let_in(cancelled, cancel_all);
      for (const std::uint64_t id : cancelled) batch_.cancel(id);
      if (cancel_all) batch_.cancel_all();
      if (clear) batch_.clear_prefix_cache();
      if (!batch_.empty()) batch_.step();
    } catch (const std::exception& error) {  // the next requests may fare better
      batch_.fail_all({ErrorCode::internal, error.what()});
    }
    const std::lock_guard lock(mutex_);
    metrics_ = batch_.metrics();
    tokens_ = batch_.prompt_tokens();
    const auto count = [&](const Arrived& one) {
      metrics_.waiting += one.request.choices;
      tokens_ += one.request.waiting_tokens();
    };
    std::ranges::for_each(later_, count);
    std::ranges::for_each(arrived_, count);
    choices_ = metrics_.waiting + metrics_.running;
    idle_ = choices_ == 0;
  }
}

// In order, as far as there is room. What has been cancelled needs none: it ends with the next step.
void Engine::let_in(std::span<const std::uint64_t> cancelled, bool all) {
  bool room = true;
  std::deque<Arrived> later;
  for (Arrived& one : later_) {
    room = room && batch_.choices() + one.request.choices <= max_choices_;
    if (room || all || std::ranges::find(cancelled, one.id) != cancelled.end()) {
      batch_.add(one.id, std::move(one.request), one.at_us);
    } else {
      later.push_back(std::move(one));
    }
  }
  later_ = std::move(later);
}

}  // namespace basin::engine
