#include "kv/pages.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"

namespace basin::kv {

const Pages::State& Pages::at(std::int32_t page) const {
  if (page < 0 || page >= used())
    throw Error(ErrorCode::internal, fmt::format("page {} of {}", page, used()));
  return states_[static_cast<std::size_t>(page)];
}

Pages::State& Pages::at(std::int32_t page) {
  return const_cast<State&>(static_cast<const Pages*>(this)->at(page));
}

std::int32_t Pages::next() const {
  if (!free_.empty()) return free_.back();
  // One windowed stream leaves idle pages behind all the time, and would touch all the memory there is.
  const bool many_idle = idle() >= std::max<std::int64_t>(1, limit_ / 4);
  if (used() < limit_ && !many_idle) return static_cast<std::int32_t>(used());
  return idle_.empty() ? -1 : idle_.front();
}

std::int32_t Pages::take() {
  const std::int32_t page = next();
  if (page < 0) throw Error(ErrorCode::internal, fmt::format("all {} pages are held", limit_));
  if (page == used()) {
    states_.emplace_back();
    free_.reserve(states_.capacity());
  } else if (!free_.empty()) {
    free_.pop_back();
  } else {
    if (reclaim_) reclaim_(page);
    at(page).kept = false;
    idle_.pop_front();
  }
  at(page).owners = 1;
  ++held_;
  return page;
}

void Pages::retain(std::int32_t page) {
  State& state = at(page);
  if (state.owners == 0) {
    if (!state.kept)
      throw Error(ErrorCode::internal, fmt::format("page {} is free and cannot be held", page));
    idle_.erase(state.place);
    ++held_;
  }
  if (++state.owners == 2) ++shared_;
}

bool Pages::release(std::int32_t page) {
  State& state = at(page);
  if (state.owners == 0) throw Error(ErrorCode::internal, fmt::format("page {} is released twice", page));
  if (state.owners == 2) --shared_;
  if (--state.owners > 0) return false;
  --held_;
  if (state.kept) {
    state.place = idle_.insert(idle_.end(), page);
    return false;
  }
  free_.push_back(page);
  return true;
}

void Pages::keep(std::int32_t page) {
  if (owners(page) == 0) throw Error(ErrorCode::internal, fmt::format("page {} is kept but not held", page));
  at(page).kept = true;
}

bool Pages::forget(std::int32_t page) {
  State& state = at(page);
  if (!state.kept) return false;
  state.kept = false;
  if (state.owners > 0) return false;
  idle_.erase(state.place);
  free_.push_back(page);
  return true;
}

void Pages::check_invariants() const {
  std::int64_t held = 0, shared = 0, idle = 0;
  for (const State& state : states_) {
    held += state.owners > 0;
    shared += state.owners > 1;
    idle += state.owners == 0 && state.kept;
  }
  const auto free = static_cast<std::int64_t>(free_.size());
  const bool agrees = held == held_ && shared == shared_ && idle == static_cast<std::int64_t>(idle_.size()) &&
                      held + idle + free == used() && used() <= limit_;
  if (agrees) return;
  throw Error(
      ErrorCode::internal,
      fmt::format("pages: {} used of {}, counted {} held, {} shared, {} idle; noted {}, {}, {} and {} free",
                  used(), limit_, held, shared, idle, held_, shared_, idle_.size(), free));
}

}  // namespace basin::kv
