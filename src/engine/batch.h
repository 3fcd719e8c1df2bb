// All sequences that are being answered, and one step of them. It has one owner: nothing here is locked.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "basin/base/thread_pool.h"
#include "engine/metrics.h"
#include "engine/request.h"
#include "engine/runner.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/text_output.h"
#include "kv/prefix_cache.h"

namespace basin::engine {

struct BatchOptions {
  std::int64_t max_sequences = 32;
  std::int64_t max_batch_tokens = 512;
  bool prefix_cache = true;
  bool check_each_step = false;  // check_invariants() in every step, for tests
  /// The time, in microseconds from any beginning.
  std::function<std::int64_t()> now_us;
};

class Batch {
 public:
  /// `runner`, `threads` and `tokenizer` (null: no text) must outlive the batch.
  Batch(Runner& runner, ThreadPool& threads, const text::Tokenizer* tokenizer, BatchOptions options);
  ~Batch();

  /// Throws Error(invalid_argument) when it could never be answered: sampling out of range, ids outside the vocabulary, more
  /// pages than there are. Thread-safe.
  void check(const Request& request) const;

  /// Takes a checked request that arrived at `arrival_us`. `id` is not in use.
  void add(std::uint64_t id, Request request, std::int64_t arrival_us);
  /// Its pages are free, and its last event has come, when the next step begins. Unknown ids are none of its business.
  void cancel(std::uint64_t id);
  void cancel_all();
  /// Forgets what the prefix cache knows.
  void clear_prefix_cache();

  bool empty() const { return sequences_.empty(); }
  std::int64_t choices() const { return static_cast<std::int64_t>(sequences_.size()); }  // that wait or run
  std::int64_t waiting() const;
  std::int64_t prompt_tokens() const;  // of all choices that wait or run
  /// Schedules and computes once. Whatever goes wrong for a sequence or in a pass fails the sequences that were part of it;
  /// what goes wrong between them is thrown.
  void step();
  /// The end of all, when a step threw.
  void fail_all(const Failure& failure);

  Metrics metrics() const;
  /// Throws Error(internal) saying what contradicts itself.
  void check_invariants() const;

 private:
  struct Sequence;
  using Sequences = std::list<std::unique_ptr<Sequence>>;
  // One row of logits for each sequence that chooses in this step.
  struct Choosing {
    Sequence* sequence;
    std::size_t row;  // of rows_
    std::int32_t token = -1;
    std::optional<TokenLogprob> logprob;
    std::optional<Failure> failure;
  };

  Schedule schedule();
  void look_up(Sequence& sequence, ScheduledSequence& plan);
  bool can_wait_for(const Sequence& sequence, const Sequence& reader) const;
  Sequence& find(std::uint64_t id) const;
  void guard(Sequence& sequence, const auto& action);
  void start(Sequence& sequence);
  void preempt(Sequence& sequence);
  void compute(std::span<const Work> work);
  void take_logits(Sequence& sequence, std::int64_t first_row, std::int64_t rows,
                   std::span<const float> logits);
  void choose();
  void go_on(Sequence& sequence, Choosing& choosing);
  void remember_pages(Sequence& sequence, std::int64_t before);
  void release(Sequence& sequence);
  void tell(Sequence& sequence, Event event);
  void end(Sequence& sequence, Event event);
  void fail(Sequence& sequence, const Failure& failure);
  void unblock(const Sequence& sequence);
  void remove_ended();
  void check_pages(std::size_t kind) const;

  Runner& runner_;
  ThreadPool& threads_;
  const text::Tokenizer* tokenizer_;
  BatchOptions options_;
  ScheduleLimits limits_;
  std::optional<kv::PrefixCache> prefix_;
  Sequences sequences_;  // by rank
  std::unordered_map<std::uint64_t, Sequence*> by_id_;
  std::uint64_t next_sequence_ = 1;
  Metrics metrics_;

  std::vector<Choosing> choosing_;
  std::vector<float> rows_;           // [rows, vocabulary]
  std::vector<std::int32_t> filled_;  // the pages of one page of tokens, of each kind of layers
};

}  // namespace basin::engine
