#include "engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "basin/base/error.h"

namespace basin::engine {
namespace {

// More would look up more prompts in the prefix cache than a pass has room for.
constexpr std::int64_t kMostAdmissions = 16;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

bool goes_before(const ScheduledSequence& a, const ScheduledSequence& b) {
  return a.rank_us != b.rank_us ? a.rank_us < b.rank_us : a.id < b.id;
}

// A sequence of this pass, with what it has got so far.
struct Turn {
  const ScheduledSequence* sequence;
  std::int64_t computed;  // where it starts from
  std::int64_t tokens = 0;

  std::int64_t remaining() const { return sequence->known_tokens - computed - tokens; }
};

class Pass {
 public:
  explicit Pass(const Schedule& schedule)
      : schedule_(schedule), tokens_(schedule.limits.max_batch_tokens), pages_(schedule.available_pages) {
    for (const ScheduledSequence& sequence : schedule.sequences) {
      (sequence.running ? running_ : waiting_).push_back(&sequence);
    }
    const auto by_rank = [](const ScheduledSequence* a, const ScheduledSequence* b) {
      return goes_before(*a, *b);
    };
    std::ranges::sort(running_, by_rank);
    std::ranges::sort(waiting_, by_rank);
  }

  Decision decide() {
    Decision decision;
    for (const ScheduledSequence& sequence : schedule_.sequences) {
      if (sequence.cancelled || sequence.deadline_us <= schedule_.now_us)
        decision.drop.push_back(sequence.id);
    }
    if (!decision.drop.empty()) return decision;
    if (!those_that_must_go_on_can()) {
      decision.preempt.push_back(running_.back()->id);
      return decision;
    }
    for (const ScheduledSequence* sequence : running_) {
      turns_.push_back({sequence, sequence->computed_tokens});
      if (turns_.back().remaining() == 1) give(turns_.back(), 1);
    }
    admit(decision);
    share_out();
    for (const Turn& turn : turns_) {
      if (turn.tokens > 0) decision.work.push_back({turn.sequence->id, turn.tokens});
    }
    return decision;
  }

 private:
  // All that decode, and the one of lowest rank, whatever it does.
  bool those_that_must_go_on_can() const {
    if (running_.size() <= 1) return true;  // it alone fits, or it would not have been let in
    std::int64_t pages = 0;
    for (const ScheduledSequence* sequence : running_) {
      const bool decodes = sequence->known_tokens - sequence->computed_tokens == 1;
      if (decodes || sequence == running_.front()) pages += new_pages(schedule_.limits, *sequence, 1);
    }
    return pages <= pages_;
  }

  std::int64_t pages_of(const Turn& turn, std::int64_t tokens) const {
    const std::int64_t page_tokens = schedule_.limits.page_tokens;
    return ceil_div(turn.computed + turn.tokens + tokens, page_tokens) -
           ceil_div(turn.computed + turn.tokens, page_tokens);
  }

  // As much of `tokens` as pages and the budget allow.
  void give(Turn& turn, std::int64_t tokens) {
    const std::int64_t page_tokens = schedule_.limits.page_tokens;
    const std::int64_t at = turn.computed + turn.tokens;
    const std::int64_t room =
        ceil_div(at, page_tokens) * page_tokens - at + std::max<std::int64_t>(0, pages_) * page_tokens;
    tokens = std::min({tokens, turn.remaining(), tokens_, room});
    if (tokens <= 0) return;
    pages_ -= pages_of(turn, tokens);
    tokens_ -= tokens;
    turn.tokens += tokens;
  }

  void admit(Decision& decision) {
    // Promised: what running sequences need until their known tokens are computed, and the next page of each.
    std::int64_t promised = 0;
    for (const Turn& turn : turns_) promised += 1 + still_needed(turn, turn.sequence->held_pages);
    for (const ScheduledSequence* sequence : waiting_) {
      const auto sequences = static_cast<std::int64_t>(turns_.size());
      if (sequences >= schedule_.limits.max_sequences || tokens_ == 0 ||
          static_cast<std::int64_t>(decision.admit.size()) == kMostAdmissions)
        return;
      if (sequence->blocked) continue;
      Turn turn{sequence, sequence->cached_tokens};
      const std::int64_t needed = still_needed(turn, sequence->cached_pages) + sequence->cached_idle_pages;
      if (!turns_.empty() && needed + promised > pages_) return;
      promised += needed - sequence->cached_idle_pages + 1;
      pages_ -= sequence->cached_idle_pages;
      decision.admit.push_back(sequence->id);
      turns_.push_back(turn);
    }
  }

  std::int64_t still_needed(const Turn& turn, std::int64_t held) const {
    const ScheduledSequence& sequence = *turn.sequence;
    if (turn.remaining() == 0) return 0;
    return std::max<std::int64_t>(
        0, most_pages(schedule_.limits, sequence.policy, sequence.known_tokens) - held);
  }

  void share_out() {
    std::vector<Turn*> prompts;
    for (Turn& turn : turns_) {
      if (turn.remaining() > 0 && turn.tokens == 0) prompts.push_back(&turn);
    }
    if (prompts.empty()) return;
    std::ranges::sort(prompts,
                      [](const Turn* a, const Turn* b) { return goes_before(*a->sequence, *b->sequence); });
    Turn& first = *prompts.front();
    give(first, (tokens_ + 1) / 2);
    std::sort(prompts.begin() + 1, prompts.end(), [](const Turn* a, const Turn* b) {
      return a->remaining() != b->remaining() ? a->remaining() < b->remaining()
                                              : goes_before(*a->sequence, *b->sequence);
    });
    for (auto turn = prompts.begin() + 1; turn != prompts.end(); ++turn) give(**turn, tokens_);
    give(first, tokens_);
  }

  const Schedule& schedule_;
  std::vector<const ScheduledSequence*> running_, waiting_;  // by rank
  std::vector<Turn> turns_;
  std::int64_t tokens_, pages_;  // left
};

void refuse(const std::string& what) {
  throw Error(ErrorCode::internal, "the schedule contradicts itself: " + what);
}

}  // namespace

std::int64_t new_pages(const ScheduleLimits& limits, const ScheduledSequence& sequence, std::int64_t tokens) {
  return ceil_div(sequence.computed_tokens + tokens, limits.page_tokens) -
         ceil_div(sequence.computed_tokens, limits.page_tokens);
}

std::int64_t most_pages(const ScheduleLimits& limits, const kv::Policy& policy, std::int64_t tokens) {
  const std::int64_t all = ceil_div(tokens, limits.page_tokens);
  if (policy.window == 0) return all;
  return std::min(all, kv::page_bound(policy, limits.page_tokens, std::min(tokens, limits.max_batch_tokens)));
}

Decision decide(const Schedule& schedule) {
  return Pass(schedule).decide();
}

void check_invariants(const Schedule& schedule) {
  const ScheduleLimits& limits = schedule.limits;
  if (limits.max_sequences < 1 || limits.max_batch_tokens < limits.max_sequences || limits.page_tokens < 1 ||
      limits.pages < 1)
    refuse("its limits");
  if (schedule.available_pages < 0 || schedule.available_pages > limits.pages)
    refuse(fmt::format("{} of {} pages are available", schedule.available_pages, limits.pages));
  std::unordered_set<std::uint64_t> ids;
  std::int64_t running = 0;
  for (const ScheduledSequence& sequence : schedule.sequences) {
    const std::string who = fmt::format("sequence {} ", sequence.id);
    if (!ids.insert(sequence.id).second) refuse(who + "is there twice");
    if (sequence.known_tokens <= sequence.computed_tokens || sequence.computed_tokens < 0)
      refuse(who +
             fmt::format("has computed {} of {} tokens", sequence.computed_tokens, sequence.known_tokens));
    running += sequence.running;
    if (!sequence.running && (sequence.held_pages != 0 || sequence.computed_tokens != 0))
      refuse(who + fmt::format("waits and holds {} pages", sequence.held_pages));
    if (sequence.running && sequence.blocked) refuse(who + "runs and is blocked");
    if (sequence.held_pages < 0 ||
        sequence.held_pages >
            most_pages(limits, sequence.policy, std::max<std::int64_t>(1, sequence.computed_tokens)))
      refuse(who +
             fmt::format("holds {} pages for {} tokens", sequence.held_pages, sequence.computed_tokens));
    if (!sequence.running && sequence.cached_tokens >= sequence.known_tokens)
      refuse(who + "would find nothing to compute");
  }
  if (running > limits.max_sequences) refuse(fmt::format("{} sequences run", running));
}

void check_invariants(const Schedule& schedule, const Decision& decision) {
  std::unordered_map<std::uint64_t, const ScheduledSequence*> by_id;
  for (const ScheduledSequence& sequence : schedule.sequences) by_id[sequence.id] = &sequence;
  const bool leaves = !decision.drop.empty() || !decision.preempt.empty();
  if (leaves && (!decision.admit.empty() || !decision.work.empty()))
    refuse("somebody leaves and others go on");
  for (const std::uint64_t id : decision.preempt) {
    if (!by_id.at(id)->running) refuse(fmt::format("sequence {} waits and is preempted", id));
  }
  std::int64_t pages = 0, tokens = 0, running = 0;
  for (const auto& [id, sequence] : by_id) running += sequence->running;
  std::unordered_set<std::uint64_t> admitted(decision.admit.begin(), decision.admit.end()), worked;
  if (admitted.size() != decision.admit.size()) refuse("somebody starts twice");
  for (const std::uint64_t id : decision.admit) {
    const ScheduledSequence& sequence = *by_id.at(id);
    if (sequence.running || sequence.blocked) refuse(fmt::format("sequence {} cannot start", id));
    pages += sequence.cached_idle_pages;
    ++running;
  }
  if (running > schedule.limits.max_sequences) refuse("too many start");
  for (const Work& work : decision.work) {
    ScheduledSequence sequence = *by_id.at(work.id);
    if (!worked.insert(work.id).second) refuse(fmt::format("sequence {} works twice", work.id));
    if (!sequence.running && !admitted.contains(work.id))
      refuse(fmt::format("sequence {} waits and works", work.id));
    if (!sequence.running) sequence.computed_tokens = sequence.cached_tokens;
    if (work.tokens < 1 || work.tokens > sequence.known_tokens - sequence.computed_tokens)
      refuse(fmt::format("sequence {} computes {} tokens", work.id, work.tokens));
    pages += new_pages(schedule.limits, sequence, work.tokens);
    tokens += work.tokens;
  }
  if (pages > schedule.available_pages)
    refuse(fmt::format("a pass takes {} of {} pages", pages, schedule.available_pages));
  if (tokens > schedule.limits.max_batch_tokens) refuse(fmt::format("a pass computes {} tokens", tokens));
}

}  // namespace basin::engine
