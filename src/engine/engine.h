// The serving engine: one thread owns the batch, requests arrive by a queue, answers leave by callbacks.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "engine/batch.h"

namespace basin::engine {

struct EngineOptions {
  BatchOptions batch;                                    // now_us is the engine's own
  std::int64_t max_waiting = 1024;                       // choices that wait, beside those that can run
  std::int64_t max_waiting_tokens = kMostWaitingTokens;  // of the prompts of all choices that wait or run
};

class Engine {
 public:
  /// `runner`, `threads` and `tokenizer` must outlive the engine, and are its own from now on.
  Engine(Runner& runner, ThreadPool& threads, const text::Tokenizer* tokenizer, const EngineOptions& options);
  ~Engine() { stop(); }

  /// Cancels what is left and ends the thread: no callback comes after it. Nothing may be submitted any more.
  void stop();

  /// All of the requests or none. Nothing when too many wait. One list may be longer than the queue: what has no room of it
  /// comes in as room is made, and until then nothing else is taken. Throws Error(invalid_argument) when one of them
  /// could never be answered.
  std::optional<std::vector<std::uint64_t>> submit(std::vector<Request> requests);
  std::optional<std::uint64_t> submit(Request request);
  /// Its last event comes within a step; none when it has ended already.
  void cancel(std::uint64_t id);
  void cancel_all();
  void clear_prefix_cache();

  Metrics metrics() const;  // as of the end of the last step
  bool idle() const;        // nothing waits and nothing runs

 private:
  struct Arrived {
    std::uint64_t id;
    Request request;
    std::int64_t at_us;
  };
  void loop();
  void let_in(std::span<const std::uint64_t> cancelled, bool all);

  Batch batch_;                            // the thread's, but for check()
  std::int64_t max_choices_, max_tokens_;  // that wait or run

  mutable std::mutex mutex_;  // of all below
  std::condition_variable wake_;
  std::vector<Arrived> arrived_;
  std::vector<std::uint64_t> cancelled_;
  bool clear_ = false, cancel_all_ = false, stopping_ = false, idle_ = true;
  std::int64_t choices_ = 0, tokens_ = 0;  // that wait or run, as of the last step
  std::uint64_t next_id_ = 1;
  Metrics metrics_;

  std::deque<Arrived> later_;  // the thread's: of a list longer than the queue

  std::jthread thread_;
};

}  // namespace basin::engine
