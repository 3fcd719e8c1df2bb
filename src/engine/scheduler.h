// What the next pass computes, and for whom: a pure function of plain data. Nothing here knows a model, a device or memory.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/cache.h"

namespace basin::engine {

struct ScheduleLimits {
  std::int64_t max_sequences = 32;      // most that run at once
  std::int64_t max_batch_tokens = 512;  // of one pass, >= max_sequences
  std::int64_t page_tokens = 16;
  std::int64_t pages = 0;  // of the pool
};

/// A priority is a head start in time of arrival, so that every request is the first one day, whatever comes after it.
inline constexpr std::int64_t kPriorityHeadStartUs = 10'000'000;
inline constexpr std::int64_t kNever = std::int64_t{1} << 62;

struct ScheduledSequence {
  std::uint64_t id = 0;
  std::int64_t rank_us =
      0;  // arrival minus the head start of its priority; the lower goes first, then the lower id
  std::int64_t deadline_us = kNever;
  bool cancelled = false;
  bool running = false;  // else it waits and holds nothing
  bool blocked = false;  // waits for a sequence with the same prompt, whose pages it will share
  std::int64_t known_tokens =
      0;  // prompt and what has been chosen since: at least one more than computed_tokens
  std::int64_t computed_tokens = 0;  // whose keys and values exist
  std::int64_t held_pages = 0;
  /// Of a waiting sequence: what is there already when it starts. Of its pages `cached_idle_pages` are held by nobody until
  /// then: it finds them, or takes them for what it has a copy of.
  std::int64_t cached_tokens = 0, cached_pages = 0, cached_idle_pages = 0;
  kv::Policy policy;
};

struct Schedule {
  ScheduleLimits limits;
  std::int64_t now_us = 0;
  std::int64_t available_pages = 0;  // held by nobody
  std::vector<ScheduledSequence> sequences;
};

struct Work {
  std::uint64_t id = 0;
  std::int64_t tokens = 0;  // the next ones of the sequence
};

/// Either somebody leaves or gives back its pages, and nothing else happens (ask again then); or who starts, and what the
/// pass computes. All of it empty: nothing can be done before the next event.
struct Decision {
  std::vector<std::uint64_t> drop;     // cancelled, or past the deadline
  std::vector<std::uint64_t> preempt;  // give back all pages and wait, in the old place
  std::vector<std::uint64_t> admit;    // start, in this order
  std::vector<Work> work;              // those admitted included; no sequence twice
};

/// - Sequences whose next token is the last known one (they decode) go first, one token each.
/// - What is left of the tokens goes to prompts: half to the one of lowest rank, the rest to those that are nearest to
///   their end. So short prompts pass long ones, and no stream of short ones stops a long one.
/// - Waiting sequences start strictly by rank, when the pages of their known tokens fit beside what the running ones
///   still need for theirs. A window bounds that number.
/// - When pages run out, the running sequence of highest rank gives back its own. The lowest always goes on.
Decision decide(const Schedule& schedule);

/// New pages that `tokens` more tokens take.
std::int64_t new_pages(const ScheduleLimits& limits, const ScheduledSequence& sequence, std::int64_t tokens);
/// Most pages that a sequence of `tokens` tokens holds at any time while they are computed.
std::int64_t most_pages(const ScheduleLimits& limits, const kv::Policy& policy, std::int64_t tokens);

/// Throw Error(internal) saying what contradicts itself: the data, or a decision about it.
void check_invariants(const Schedule& schedule);
void check_invariants(const Schedule& schedule, const Decision& decision);

}  // namespace basin::engine
