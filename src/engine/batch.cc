#include "engine/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "basin/base/error.h"

namespace basin::engine {
namespace {

constexpr std::int64_t kMostLookups = 16;  // waiting prompts that a step looks up in the prefix cache

double seconds(std::int64_t us) {
  return static_cast<double>(us) * 1e-6;
}

Failure failure_of(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return {known != nullptr ? known->code() : ErrorCode::internal, error.what()};
}

}  // namespace

// One choice of a request.
struct Batch::Sequence {
  std::uint64_t id = 0, request_id = 0;
  std::int64_t choice = 0;
  std::shared_ptr<const Request> request;
  std::int64_t arrival_us = 0, rank_us = 0, deadline_us = kNever;

  std::vector<std::int32_t> history;                    // prompt and chosen tokens, never cut
  std::optional<kv::SequenceCache> cache;               // while it runs
  std::optional<kv::SequenceCache> parked;              // copied out, while it waits to go on
  kv::PrefixCache::Node node = kv::PrefixCache::kRoot;  // while it runs or is parked, with the prefix cache
  Sampler sampler;
  TextOutput text;
  std::vector<TokenLogprob> prompt_logprobs;  // of prompt tokens 1, 2, ...

  bool cancelled = false, blocked = false, ended = false, prompt_told = false;
  kv::PrefixCache::Match match;  // of the schedule being decided
  Usage usage;
  Times times;
  std::int64_t last_token_us = 0;

  Sequence(std::shared_ptr<const Request> the_request, std::int64_t index)
      : choice(index),
        request(std::move(the_request)),
        history(request->prompt),
        sampler(seeded(request->sampling, index), request->prompt),
        text(request->stops, request->include_stop) {
    usage.prompt_tokens = static_cast<std::int64_t>(request->prompt.size());
  }

  std::int64_t known_tokens() const { return static_cast<std::int64_t>(history.size()); }
  std::int64_t computed_tokens() const { return cache ? cache->logical_position() : 0; }
  bool decodes() const {
    return computed_tokens() >= usage.prompt_tokens && known_tokens() - computed_tokens() == 1;
  }
  std::int64_t kept_tokens() const {
    return std::max(usage.kept_tokens, cache ? cache->full().kept_tokens_max() : 0);
  }
  std::int64_t parked_pages() const { return parked ? parked->copied_pages() : 0; }

  static SamplingRequest seeded(SamplingRequest sampling, std::int64_t index) {
    sampling.options.seed += static_cast<std::uint64_t>(index);
    return sampling;
  }
};

Batch::Batch(Runner& runner, ThreadPool& threads, const text::Tokenizer* tokenizer, BatchOptions options)
    : runner_(runner), threads_(threads), tokenizer_(tokenizer), options_(std::move(options)) {
  limits_.max_sequences = options_.max_sequences;
  limits_.max_batch_tokens = options_.max_batch_tokens;
  limits_.page_tokens = runner.pool().shape().page_tokens;
  limits_.pages = runner.pool().pages().limit();
  if (limits_.max_sequences < 1 || limits_.max_batch_tokens < limits_.max_sequences) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} sequences and {} tokens of a pass; each sequence needs a token of every pass",
                            limits_.max_sequences, limits_.max_batch_tokens));
  }
  if (options_.prefix_cache) prefix_.emplace(runner.kinds());
}

Batch::~Batch() {
  for (const auto& sequence : sequences_) release(*sequence);
}

void Batch::check(const Request& request) const {
  engine::check(request.sampling, runner_.vocabulary());
  const auto refuse = [](const std::string& what) { throw Error(ErrorCode::invalid_argument, what); };
  if (request.prompt.empty()) refuse("the prompt has no tokens");
  for (const std::int32_t token : request.prompt) {
    if (token < 0 || token >= runner_.vocabulary())
      refuse(fmt::format("token id {} is outside the vocabulary of {}", token, runner_.vocabulary()));
  }
  const auto tokens = static_cast<std::int64_t>(request.prompt.size()) + request.max_tokens;
  ScheduleLimits slowest = limits_;  // a pass may be as small as one token
  slowest.max_batch_tokens = 1;
  const std::int64_t pages = most_pages(slowest, request.policy, tokens);
  if (pages > limits_.pages) {
    refuse(fmt::format("{} tokens need {} pages of keys and values, and there are {}", tokens, pages,
                       limits_.pages));
  }
}

void Batch::add(std::uint64_t id, Request request, std::int64_t arrival_us) {
  const auto shared = std::make_shared<const Request>(std::move(request));
  try {
    for (std::int64_t choice = 0; choice < shared->choices; ++choice) {
      auto sequence = std::make_unique<Sequence>(shared, choice);
      sequence->id = next_sequence_++;
      sequence->request_id = id;
      sequence->arrival_us = arrival_us;
      sequence->rank_us = arrival_us - shared->priority * kPriorityHeadStartUs;
      if (shared->timeout_us) sequence->deadline_us = arrival_us + *shared->timeout_us;
      sequence->blocked = choice > 0 && prefix_.has_value() && !shared->prompt_logprobs;
      const auto place = std::ranges::find_if(sequences_.rbegin(), sequences_.rend(), [&](const auto& other) {
        return other->rank_us <= sequence->rank_us;
      });
      by_id_[sequence->id] = sequence.get();
      sequences_.insert(place.base(), std::move(sequence));
      metrics_.prompt_tokens += static_cast<std::int64_t>(shared->prompt.size());
    }
  } catch (const std::exception& error) {  // all of its choices or none
    for (const auto& sequence : sequences_) sequence->ended = sequence->ended || sequence->request_id == id;
    remove_ended();
    ++metrics_.failed;
    Event event;
    event.failure = failure_of(error);
    shared->on_event(std::move(event));
  }
}

void Batch::cancel(std::uint64_t id) {
  for (const auto& sequence : sequences_) {
    if (sequence->request_id == id) sequence->cancelled = true;
  }
}

void Batch::cancel_all() {
  for (const auto& sequence : sequences_) sequence->cancelled = true;
}

void Batch::clear_prefix_cache() {
  if (prefix_) prefix_->clear();
}

std::int64_t Batch::waiting() const {
  return std::ranges::count_if(sequences_, [](const auto& sequence) { return !sequence->cache; });
}

std::int64_t Batch::prompt_tokens() const {
  std::int64_t tokens = 0;
  for (const auto& sequence : sequences_) tokens += sequence->usage.prompt_tokens;
  return tokens;
}

Batch::Sequence& Batch::find(std::uint64_t id) const {
  return *by_id_.at(id);
}

Schedule Batch::schedule() {
  Schedule schedule;
  schedule.limits = limits_;
  schedule.now_us = options_.now_us();
  schedule.available_pages = runner_.pool().pages().available();
  std::int64_t running = 0, lookups = 0;
  for (const auto& sequence : sequences_) running += sequence->cache.has_value();
  std::vector<const Sequence*> readers;  // of prompts, now or from this pass on
  for (const auto& sequence : sequences_) {
    if (sequence->cache && !sequence->decodes()) readers.push_back(sequence.get());
  }
  for (const auto& sequence : sequences_) {
    ScheduledSequence plan;
    plan.id = sequence->id;
    plan.rank_us = sequence->rank_us;
    plan.deadline_us = sequence->deadline_us;
    plan.cancelled = sequence->cancelled;
    plan.running = sequence->cache.has_value();
    plan.blocked = sequence->blocked;
    plan.known_tokens = sequence->known_tokens();
    plan.computed_tokens = sequence->computed_tokens();
    plan.held_pages = sequence->cache ? sequence->cache->full().allocated_pages() : 0;
    plan.policy = sequence->request->policy;
    if (sequence->parked) {
      plan.cached_tokens = sequence->parked->logical_position();
      plan.cached_pages = plan.cached_idle_pages = sequence->parked_pages();
    } else if (!plan.running && !plan.blocked && running < limits_.max_sequences && lookups < kMostLookups) {
      ++lookups;
      look_up(*sequence, plan);
      // Of several prompts with one beginning the first computes it, and the others find it.
      plan.blocked = std::ranges::any_of(
          readers, [&](const Sequence* reader) { return can_wait_for(*sequence, *reader); });
      if (!plan.blocked) readers.push_back(sequence.get());
    }
    schedule.sequences.push_back(std::move(plan));
  }
  return schedule;
}

// What of its tokens is there already. Log-probabilities of the prompt need every one of its rows.
void Batch::look_up(Sequence& sequence, ScheduledSequence& plan) {
  sequence.match = {};
  const auto scored = static_cast<std::int64_t>(sequence.prompt_logprobs.size()) + 1;
  if (!prefix_ || (sequence.request->prompt_logprobs && scored < sequence.usage.prompt_tokens)) return;
  const kv::PrefixCache::Match match = sequence.match =
      prefix_->find(sequence.history, sequence.request->policy);
  const std::int64_t copied =
      match.tokens % limits_.page_tokens != 0;  // takes a page of its own at the start
  plan.cached_tokens = match.tokens;
  plan.cached_pages = match.held_pages + match.idle_pages + copied;
  plan.cached_idle_pages = match.idle_pages + copied;
}

// Whether `reader` is about to fill pages that `sequence`, which has been looked up, would find. The beginning of a page is
// worth waiting for when it leaves one token to compute.
bool Batch::can_wait_for(const Sequence& sequence, const Sequence& reader) const {
  const kv::Policy &a = sequence.request->policy, &b = reader.request->policy;
  const bool same_mask =
      a.sink_tokens == b.sink_tokens && a.window == b.window && a.in_cache_positions == b.in_cache_positions;
  if (!prefix_ || !same_mask || sequence.request->prompt_logprobs) return false;
  const auto own =
      std::span(sequence.history).first(sequence.history.size() - 1);  // one token is left to compute
  const auto common = std::ranges::mismatch(own, reader.history).in1 - own.begin();
  const std::int64_t whole = common / limits_.page_tokens * limits_.page_tokens;
  const bool to_its_end = common == std::ssize(own) && common <= reader.usage.prompt_tokens;
  const std::int64_t shared_tokens = to_its_end ? common : whole;
  // A page is known once it is full, or the prompt ends in it.
  const std::int64_t known_at =
      shared_tokens == whole ? whole : std::min(whole + limits_.page_tokens, reader.usage.prompt_tokens);
  const std::int64_t done = reader.cache ? reader.computed_tokens() : reader.match.tokens;
  return shared_tokens > sequence.match.tokens && known_at > done;
}

void Batch::step() {
  Decision decision;
  for (;;) {
    const Schedule plan = schedule();
    decision = decide(plan);
    if (options_.check_each_step) {
      engine::check_invariants(plan);
      engine::check_invariants(plan, decision);
      check_invariants();
    }
    for (const std::uint64_t id : decision.drop) {
      Sequence& sequence = find(id);
      Event event;
      if (sequence.cancelled) {
        event.finish_reason = FinishReason::cancelled;
        end(sequence, std::move(event));
      } else {
        fail(sequence, {ErrorCode::cancelled, "the request's time is over"});
      }
    }
    for (const std::uint64_t id : decision.preempt)
      guard(find(id), [&](Sequence& sequence) { preempt(sequence); });
    if (decision.drop.empty() && decision.preempt.empty()) break;
    remove_ended();
  }
  const std::int64_t begin_us = options_.now_us();
  // First all hold or copy what they have found, and only then are pages taken for copies: one that is taken could be found.
  for (const std::uint64_t id : decision.admit) guard(find(id), [&](Sequence& sequence) { start(sequence); });
  for (const std::uint64_t id : decision.admit) {
    guard(find(id), [](Sequence& sequence) {
      if (!sequence.ended) sequence.cache->copy_in();
    });
  }
  if (!decision.work.empty()) compute(decision.work);
  remove_ended();
  if (decision.work.empty()) return;
  ++metrics_.steps;
  metrics_.step_time.add(seconds(options_.now_us() - begin_us));
}

// What goes wrong for one sequence ends that one.
void Batch::guard(Sequence& sequence, const auto& action) {
  try {
    action(sequence);
  } catch (const std::exception& error) {
    fail(sequence, failure_of(error));
  }
}

void Batch::start(Sequence& sequence) {
  if (sequence.parked) {
    sequence.cache = std::move(sequence.parked);
    sequence.parked.reset();
    return;
  }
  sequence.cache.emplace(runner_.make_cache(sequence.request->policy));
  sequence.cache->hold_left_window();
  sequence.cache->adopt(sequence.match.pages, sequence.match.tokens);
  if (prefix_) {
    sequence.node = sequence.match.node;
    prefix_->enter(sequence.node);
  }
  if (sequence.times.started_us == 0) {
    sequence.times.started_us = options_.now_us() - sequence.arrival_us;
    sequence.usage.cached_tokens = sequence.match.tokens;
    metrics_.queue_time.add(seconds(sequence.times.started_us));
    if (prefix_) {
      metrics_.prefix_queried_tokens += sequence.usage.prompt_tokens;
      metrics_.prefix_hit_tokens += sequence.match.tokens;
    }
  }
  sequence.match = {};
}

// Under a window the pages are few, whatever the length of the text, and are copied out. Without one all will be computed
// again from the whole history, under the same mask. Nobody can tell either from the answer.
void Batch::preempt(Sequence& sequence) {
  ++sequence.usage.preemptions;
  ++metrics_.preemptions;
  std::int64_t parked_pages = 0;
  for (const auto& other : sequences_) parked_pages += other->parked_pages();
  const bool room = parked_pages + sequence.cache->full().allocated_pages() <= limits_.pages;
  if (sequence.request->policy.window == 0 || !room) return release(sequence);
  sequence.usage.kept_tokens = sequence.kept_tokens();
  sequence.cache->copy_out();
  sequence.parked = std::move(sequence.cache);
  sequence.cache.reset();
  metrics_.copied_pages += sequence.parked_pages();
}

void Batch::release(Sequence& sequence) {
  if (!sequence.cache && !sequence.parked) return;
  sequence.usage.kept_tokens = sequence.kept_tokens();
  sequence.cache.reset();
  sequence.parked.reset();
  if (prefix_) prefix_->leave(sequence.node);
  sequence.node = kv::PrefixCache::kRoot;
}

void Batch::compute(std::span<const Work> work) {
  std::vector<Sequence*> sequences;
  std::vector<RunnerWork> passes;
  std::vector<std::int64_t> before;
  choosing_.clear();
  for (const Work& item : work) {
    Sequence& sequence = find(item.id);
    if (sequence.ended) continue;  // could not start
    const std::int64_t computed = sequence.computed_tokens();
    const auto scored = static_cast<std::int64_t>(sequence.prompt_logprobs.size()) + 1;
    RunnerWork pass;
    pass.cache = &*sequence.cache;
    pass.tokens = std::span<const std::int32_t>(sequence.history)
                      .subspan(static_cast<std::size_t>(computed), static_cast<std::size_t>(item.tokens));
    pass.rows = computed + item.tokens == sequence.known_tokens() ? models::LogitsRows::last
                                                                  : models::LogitsRows::none;
    if (sequence.request->prompt_logprobs && scored < sequence.usage.prompt_tokens)
      pass.rows = models::LogitsRows::all;
    sequences.push_back(&sequence);
    passes.push_back(pass);
    before.push_back(computed);
    metrics_.computed_tokens += item.tokens;
  }
  if (passes.empty()) return;
  try {
    runner_.run(passes, [&](std::size_t index, std::int64_t first_row, std::int64_t rows,
                            std::span<const float> logits) {
      take_logits(*sequences[index], before[index] + first_row, rows, logits);
    });
  } catch (const std::exception& error) {
    for (Sequence* sequence : sequences) fail(*sequence, failure_of(error));
    return;
  }
  for (std::size_t i = 0; i < sequences.size(); ++i)
    guard(*sequences[i], [&](Sequence& sequence) { remember_pages(sequence, before[i]); });
  std::erase_if(choosing_, [](const Choosing& choosing) { return choosing.sequence->ended; });
  choose();
}

// `first` is the logical position of the first row.
void Batch::take_logits(Sequence& sequence, std::int64_t first, std::int64_t rows,
                        std::span<const float> logits) {
  const auto width = static_cast<std::size_t>(runner_.vocabulary());
  const auto row = [&](std::int64_t index) {
    return logits.subspan(static_cast<std::size_t>(index) * width, width);
  };
  if (sequence.request->prompt_logprobs) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t next = first + i + 1;  // the token that this row predicts
      // A replay after a preemption has scored some of them before.
      if (next != static_cast<std::int64_t>(sequence.prompt_logprobs.size()) + 1 ||
          next >= sequence.usage.prompt_tokens)
        continue;
      sequence.prompt_logprobs.push_back(logprob_of(row(i), sequence.history[static_cast<std::size_t>(next)],
                                                    *sequence.request->prompt_logprobs));
    }
  }
  if (first + rows != sequence.known_tokens()) return;
  const auto last = row(rows - 1);
  const std::size_t at = choosing_.size() * width;
  if (rows_.size() < at + width) rows_.resize(at + width);
  std::ranges::copy(last, rows_.begin() + static_cast<std::ptrdiff_t>(at));
  choosing_.push_back({&sequence, choosing_.size(), -1, {}, {}});
}

// Pages that this pass has filled can be found by others from now on, and so can the end of the prompt within a page.
void Batch::remember_pages(Sequence& sequence, std::int64_t before) {
  const std::int64_t page_tokens = limits_.page_tokens, computed = sequence.computed_tokens(),
                     prompt = sequence.usage.prompt_tokens;
  kv::SequenceCache& cache = *sequence.cache;
  const auto find_pages = [&](std::int64_t page) -> std::span<const std::int32_t> {
    filled_.clear();
    for (std::size_t kind = 0; kind < cache.kinds(); ++kind) {
      const auto left = cache.kind(kind).left_window();
      const auto found = std::ranges::find(left, page, &kv::Cache::LeftPage::logical);
      filled_.push_back(found != left.end() ? found->page
                                            : cache.kind(kind).page_table()[static_cast<std::size_t>(page)]);
    }
    return filled_;
  };
  const auto tokens = [&](std::int64_t begin, std::int64_t end) {
    return std::span<const std::int32_t>(sequence.history)
        .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
  };
  std::int64_t begin = before / page_tokens * page_tokens;
  for (; prefix_ && begin + page_tokens <= computed; begin += page_tokens) {
    sequence.node = prefix_->advance(sequence.node, tokens(begin, begin + page_tokens),
                                     sequence.request->policy, find_pages(begin / page_tokens));
  }
  if (prefix_ && before < prompt && begin < prompt && prompt <= computed) {
    prefix_->remember_part(sequence.node, tokens(begin, prompt), sequence.request->policy,
                           find_pages(begin / page_tokens));
  }
  // A prompt may be asked again, but who would go on from the middle of an answer? So what has been written and left the
  // window makes room at once, and a stream without end does not fill the pool with its past.
  for (std::size_t kind = 0; kind < cache.kinds(); ++kind) {
    kv::Cache& kept = cache.kind(kind);
    const std::vector<kv::Cache::LeftPage> left(kept.left_window().begin(), kept.left_window().end());
    kept.free_left_window();
    for (const auto& [logical, page] : left) {
      metrics_.pages_left_window += kind == 0;
      const bool of_prompt = logical * page_tokens < sequence.usage.prompt_tokens;
      if (prefix_ && !of_prompt && kept.pool().pages().owners(page) == 0) prefix_->forget(kind, page);
    }
  }
}

void Batch::choose() {
  const auto width = static_cast<std::size_t>(runner_.vocabulary());
  // Each sequence on its own; who does it and beside whom cannot matter.
  threads_.parallel_for(static_cast<std::int64_t>(choosing_.size()), [&](std::int64_t i, int) {
    Choosing& choosing = choosing_[static_cast<std::size_t>(i)];
    Sequence& sequence = *choosing.sequence;
    if (sequence.request->max_tokens == 0) return;
    const auto logits = std::span<const float>(rows_).subspan(choosing.row * width, width);
    try {
      choosing.token = sequence.sampler.choose(logits, sequence.known_tokens());
      if (sequence.request->logprobs)
        choosing.logprob = logprob_of(logits, choosing.token, *sequence.request->logprobs);
    } catch (const std::exception& error) {
      choosing.failure = failure_of(error);
    }
  });
  for (Choosing& choosing : choosing_) {
    guard(*choosing.sequence, [&](Sequence& sequence) {
      unblock(sequence);
      if (choosing.failure) {
        fail(sequence, *choosing.failure);
      } else {
        go_on(sequence, choosing);
      }
    });
  }
}

// Its next token is chosen: tell what it says, and whether it is the last.
void Batch::go_on(Sequence& sequence, Choosing& choosing) {
  const Request& request = *sequence.request;
  Event event;
  if (request.max_tokens == 0) {
    event.finish_reason = FinishReason::length;
    end(sequence, std::move(event));
    return;
  }
  const std::int32_t token = choosing.token;
  const auto is_stop = [&](std::span<const std::int32_t> ids) {
    return std::ranges::find(ids, token) != ids.end();
  };
  const bool end_of_text = tokenizer_ != nullptr && !request.ignore_eos && is_stop(tokenizer_->stops());
  if (end_of_text || is_stop(request.stop_ids)) {
    event.text = sequence.text.finish();
    event.finish_reason = FinishReason::stop;
    if (sequence.text.stop() != nullptr) {
      event.stop_string = *sequence.text.stop();
    } else {
      event.stop_token = token;
    }
    end(sequence, std::move(event));
    return;
  }
  sequence.history.push_back(token);
  ++sequence.usage.completion_tokens;
  ++metrics_.generated_tokens;
  event.token = token;
  event.logprob = std::move(choosing.logprob);
  if (tokenizer_ != nullptr && token < tokenizer_->vocabulary())
    event.text = sequence.text.push(tokenizer_->token_bytes(token, request.show_special));
  if (sequence.text.stop() == nullptr && sequence.usage.completion_tokens == request.max_tokens) {
    event.finish_reason = FinishReason::length;
    event.text += sequence.text.finish();
  }
  if (sequence.text.stop() != nullptr) {
    event.finish_reason = FinishReason::stop;
    event.stop_string = *sequence.text.stop();
  }
  const std::int64_t now = options_.now_us();
  if (sequence.last_token_us == 0) {
    sequence.times.first_token_us = now - sequence.arrival_us;
    metrics_.first_token.add(seconds(sequence.times.first_token_us));
  } else {
    metrics_.inter_token.add(seconds(now - sequence.last_token_us));
  }
  sequence.last_token_us = now;
  if (event.finish_reason) {
    end(sequence, std::move(event));
  } else {
    tell(sequence, std::move(event));
  }
}

// The other choices of a request wait until the first has read the prompt, and find its pages.
void Batch::unblock(const Sequence& sequence) {
  if (sequence.request->choices == 1) return;
  for (const auto& other : sequences_) {
    if (other->request_id == sequence.request_id) other->blocked = false;
  }
}

void Batch::tell(Sequence& sequence, Event event) {
  event.choice = sequence.choice;
  event.usage = sequence.usage;
  event.usage.kept_tokens = sequence.kept_tokens();
  event.times = sequence.times;
  if (!sequence.prompt_told) {
    sequence.prompt_told = true;
    event.prompt_logprobs = sequence.prompt_logprobs;
  }
  try {
    sequence.request->on_event(std::move(event));
  } catch (const std::exception&) {  // nobody can be told more
    sequence.cancelled = true;
  }
}

// Its pages are free before anybody hears of the end.
void Batch::end(Sequence& sequence, Event event) {
  if (sequence.ended) return;
  sequence.ended = true;
  release(sequence);
  unblock(sequence);
  sequence.times.finished_us = options_.now_us() - sequence.arrival_us;
  metrics_.end_to_end.add(seconds(sequence.times.finished_us));
  if (event.finish_reason) {
    ++(*event.finish_reason == FinishReason::stop     ? metrics_.stopped
       : *event.finish_reason == FinishReason::length ? metrics_.reached_length
                                                      : metrics_.cancelled);
  }
  tell(sequence, std::move(event));
}

void Batch::fail(Sequence& sequence, const Failure& failure) {
  if (sequence.ended) return;
  ++(failure.code == ErrorCode::cancelled ? metrics_.timed_out : metrics_.failed);
  Event event;
  event.failure = failure;
  end(sequence, std::move(event));
}

void Batch::fail_all(const Failure& failure) {
  for (const auto& sequence : sequences_) {
    if (!sequence->ended) fail(*sequence, failure);
  }
  remove_ended();
}

void Batch::remove_ended() {
  std::erase_if(sequences_, [&](const auto& sequence) {
    if (sequence->ended) by_id_.erase(sequence->id);
    return sequence->ended;
  });
}

Metrics Batch::metrics() const {
  Metrics metrics = metrics_;
  metrics.waiting = waiting();
  metrics.running = static_cast<std::int64_t>(sequences_.size()) - metrics.waiting;
  const kv::Pages& pages = runner_.pool().pages();
  metrics.pages = pages.limit();
  metrics.pages_held = pages.held();
  metrics.pages_shared = pages.shared();
  metrics.pages_idle = pages.idle();
  return metrics;
}

void Batch::check_invariants() const {
  if (prefix_) prefix_->check_invariants();
  for (std::size_t kind = 0; kind < runner_.kinds().size(); ++kind) check_pages(kind);
}

void Batch::check_pages(std::size_t kind) const {
  const kv::Pages& pages = runner_.kinds()[kind].pool->pages();
  pages.check_invariants();
  std::unordered_map<std::int32_t, std::int64_t> owners;
  for (const auto& sequence : sequences_) {
    if (!sequence->cache) continue;
    const kv::Cache& cache = sequence->cache->kind(kind);
    std::int64_t held = 0;
    for (const std::int32_t page : cache.page_table()) {
      if (page < 0) continue;
      ++held;
      ++owners[page];
    }
    if (held != cache.allocated_pages())
      throw Error(ErrorCode::internal, fmt::format("sequence {} has lost count of its pages", sequence->id));
  }
  for (const auto& [page, count] : owners) {
    if (pages.owners(page) != count)
      throw Error(ErrorCode::internal,
                  fmt::format("page {} has {} owners and counts {}", page, count, pages.owners(page)));
  }
  if (pages.held() != static_cast<std::int64_t>(owners.size()))
    throw Error(ErrorCode::internal,
                fmt::format("{} pages are held by nobody", pages.held() - std::ssize(owners)));
}

}  // namespace basin::engine
