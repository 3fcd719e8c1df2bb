// Who holds which page. Counts and numbers only: the memory behind them is the pool's.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <vector>

namespace basin::kv {

/// A page is free, held (by one or more owners), or idle: nobody holds it, but its content is worth keeping and may be
/// held again. `take` hands out free pages first, then untouched ones while less than a quarter of the limit is idle, then
/// the page that has been idle longest.
class Pages {
 public:
  /// Most pages there may ever be.
  explicit Pages(std::int64_t limit) : limit_(limit) {}

  /// A page held once, of unspecified content. Throws Error(internal) when all are held: whoever schedules has to know.
  std::int32_t take();
  /// One more owner. The page is held or idle.
  void retain(std::int32_t page);
  /// One owner less. Without any the page is idle if it is kept, else free. True when it is free now.
  bool release(std::int32_t page);
  /// Marks a held page as worth keeping when nobody holds it.
  void keep(std::int32_t page);
  /// Takes the mark back: an idle page becomes free, a held one will. True when it is free now.
  bool forget(std::int32_t page);
  /// Called with an idle page just before it is handed out for another content.
  void on_reclaim(std::function<void(std::int32_t)> callback) { reclaim_ = std::move(callback); }

  std::int64_t owners(std::int32_t page) const { return at(page).owners; }
  std::int64_t limit() const { return limit_; }
  std::int64_t used() const {
    return static_cast<std::int64_t>(states_.size());
  }  // numbers handed out so far
  std::int64_t idle() const { return static_cast<std::int64_t>(idle_.size()); }
  std::int64_t held() const { return held_; }
  std::int64_t shared() const { return shared_; }  // held more than once
  std::int64_t available() const { return limit_ - held_; }
  /// The page that take() would hand out next, and -1 when there is none.
  std::int32_t next() const;

  /// Throws Error(internal) saying what contradicts itself.
  void check_invariants() const;

 private:
  struct State {
    std::int64_t owners = 0;
    bool kept = false;
    std::list<std::int32_t>::iterator place;  // in idle_, while idle
  };
  const State& at(std::int32_t page) const;
  State& at(std::int32_t page);

  std::int64_t limit_;
  std::vector<State> states_;       // by page
  std::vector<std::int32_t> free_;  // last in, first out
  std::list<std::int32_t> idle_;    // longest idle first
  std::int64_t held_ = 0, shared_ = 0;
  std::function<void(std::int32_t)> reclaim_;
};

}  // namespace basin::kv
