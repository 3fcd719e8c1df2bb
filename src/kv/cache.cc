#include "kv/cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t first_recent_of(const Policy& policy, std::int64_t position) {
  return policy.window == 0 ? 0 : std::max<std::int64_t>(0, position - policy.window + 1);
}

}  // namespace

bool needs_page(const Policy& policy, std::int64_t page_tokens, std::int64_t page, std::int64_t position) {
  return policy.window == 0 || page < ceil_div(policy.sink_tokens, page_tokens) ||
         page >= first_recent_of(policy, position) / page_tokens;
}

std::int64_t page_bound(const Policy& policy, std::int64_t page_tokens, std::int64_t step_tokens) {
  return ceil_div(policy.sink_tokens, page_tokens) + ceil_div(policy.window + step_tokens - 2, page_tokens) +
         1;
}

Cache::Cache(std::shared_ptr<PagePool> pool, const Policy& policy) : pool_(std::move(pool)), policy_(policy) {
  if (policy.sink_tokens < 0 || policy.window < 0 || (policy.window == 0 && policy.sink_tokens > 0)) {
    throw Error(ErrorCode::invalid_argument, fmt::format("sink_tokens {} with window {}; sinks need a window",
                                                         policy.sink_tokens, policy.window));
  }
}

// The last pages first: of pages that stay idle, those that the fewest others can use go first.
Cache::~Cache() {
  if (!pool_) return;
  free_left_window();
  for (auto page = table_.rbegin(); page != table_.rend(); ++page) {
    if (*page >= 0) pool_->release(*page);
  }
}

void Cache::adopt(std::span<const std::int32_t> pages, std::int64_t tokens) {
  const std::int64_t page_tokens = shape().page_tokens;
  if (position_ != 0 || step_ != 0) throw Error(ErrorCode::internal, "a cache that has tokens adopts pages");
  if (std::ssize(pages) != ceil_div(tokens, page_tokens))
    throw Error(ErrorCode::internal, fmt::format("{} pages are adopted for {} tokens", pages.size(), tokens));
  position_ = tokens;
  for (const std::int32_t page : pages) {
    const auto logical = static_cast<std::int64_t>(table_.size());
    if (needs_page(policy_, page_tokens, logical, position_) != (page >= 0))
      throw Error(ErrorCode::internal, fmt::format("logical page {} is adopted as {}", logical, page));
    table_.push_back(-1);
    if (page < 0) {
      evicted_before_ = logical + 1;
      continue;
    }
    pool_->pages().retain(page);
    if ((logical + 1) * page_tokens <= tokens) {
      table_.back() = page;
      allocated_max_ = std::max(allocated_max_, ++allocated_);
    } else {
      copied_ = {static_cast<std::size_t>(logical)};
      copy_.resize(static_cast<std::size_t>(shape().page_bytes()));
      pool_->copy_out(page, copy_.data());
      pool_->release(page);  // and the page was used now
    }
  }
  if (position_ > 0) kept_tokens_max_ = visible_tokens(position_ - 1);
}

std::int32_t Cache::take_page() {
  const std::int32_t page = pool_->take();
  allocated_max_ = std::max(allocated_max_, ++allocated_);
  return page;
}

void Cache::free_page(std::int32_t page) {
  --allocated_;
  pool_->release(page);
}

void Cache::copy_out() {
  if (step_ != 0 || !copied_.empty())
    throw Error(ErrorCode::internal, "a cache in a step, or without its pages, is copied out");
  free_left_window();
  const auto page_bytes = static_cast<std::size_t>(shape().page_bytes());
  copied_.reserve(static_cast<std::size_t>(allocated_));  // nothing may fail once pages are given back
  copy_.resize(static_cast<std::size_t>(allocated_) * page_bytes);
  for (std::size_t logical = 0; logical < table_.size(); ++logical) {
    if (table_[logical] < 0) continue;
    pool_->copy_out(table_[logical], copy_.data() + copied_.size() * page_bytes);
    copied_.push_back(logical);
  }
  for (auto logical = copied_.rbegin(); logical != copied_.rend(); ++logical) {
    free_page(table_[*logical]);
    table_[*logical] = -1;
  }
}

void Cache::copy_in() {
  const auto page_bytes = static_cast<std::size_t>(shape().page_bytes());
  std::size_t taken = 0;
  try {
    for (; taken < copied_.size(); ++taken) {
      table_[copied_[taken]] = take_page();
      pool_->copy_in(table_[copied_[taken]], copy_.data() + taken * page_bytes);
    }
  } catch (...) {
    while (taken-- > 0) {
      free_page(table_[copied_[taken]]);
      table_[copied_[taken]] = -1;
    }
    throw;
  }
  copied_ = {};
  copy_ = {};
}

void Cache::begin_step(std::int64_t tokens) {
  if (!copied_.empty()) throw Error(ErrorCode::internal, "a step without the pages that were copied out");
  if (tokens < 1 || step_ != 0)
    throw Error(ErrorCode::internal, fmt::format("a step of {} tokens inside a step of {}", tokens, step_));
  const std::int64_t pages = ceil_div(position_ + tokens, shape().page_tokens);
  step_ = tokens;
  try {
    while (static_cast<std::int64_t>(table_.size()) < pages) {
      table_.push_back(-1);
      table_.back() = take_page();
    }
  } catch (...) {
    abandon_step();
    throw;
  }
}

void Cache::abandon_step() {
  if (step_ == 0) return;
  step_ = 0;
  const std::int64_t pages = ceil_div(position_, shape().page_tokens);
  while (static_cast<std::int64_t>(table_.size()) > pages) {
    if (table_.back() >= 0) free_page(table_.back());
    table_.pop_back();
  }
}

void Cache::end_step() {
  kept_tokens_max_ = std::max(kept_tokens_max_, visible_tokens(position_ + step_ - 1));
  position_ += step_;
  step_ = 0;
  if (policy_.window == 0) return;
  const std::int64_t keep_from =
      first_recent() / shape().page_tokens;  // logical page of the oldest window token
  const std::int64_t sink_pages = ceil_div(policy_.sink_tokens, shape().page_tokens);
  std::int64_t page = std::max(evicted_before_, sink_pages);
  for (; page < std::min<std::int64_t>(keep_from, static_cast<std::int64_t>(table_.size())); ++page) {
    left_window_.push_back({page, std::exchange(table_[static_cast<std::size_t>(page)], -1)});
  }
  evicted_before_ = std::max(evicted_before_, page);
  if (!holds_left_window_) free_left_window();
}

void Cache::free_left_window() {
  for (const LeftPage& left : left_window_) free_page(left.page);
  left_window_.clear();
}

void Cache::append(std::int64_t layer, const float* k, const float* v, const float* index) {
  const auto row = [](const float* from, std::int64_t t, std::int64_t floats) {
    return from == nullptr ? nullptr : from + t * floats;
  };
  for (std::int64_t t = 0; t < step_; ++t) {
    const std::int64_t p = position_ + t;
    const std::int64_t page = table_[static_cast<std::size_t>(p / shape().page_tokens)];
    pool_->write(
        layer, page * shape().page_tokens + p % shape().page_tokens,
        {k + t * shape().key_floats(), row(v, t, shape().value_floats()), row(index, t, shape().d_index)});
  }
}

std::int64_t Cache::first_recent() const {
  return first_recent_of(policy_, position_);
}

std::int64_t Cache::visible_tokens(std::int64_t p) const {
  if (policy_.window == 0 || p < policy_.window + policy_.sink_tokens) return p + 1;
  return policy_.window + policy_.sink_tokens;
}

std::int64_t Cache::cache_position() const {
  return visible_tokens(position_) - 1;
}

std::int64_t Cache::write_slot() const {
  const std::int64_t page = position_ / shape().page_tokens;
  const std::int64_t physical = page < static_cast<std::int64_t>(table_.size())
                                    ? table_[static_cast<std::size_t>(page)]
                                    : pool_->pages().next();  // the page that take_page would hand out
  return physical * shape().page_tokens + position_ % shape().page_tokens;
}

std::int64_t Cache::kept_tokens() const {
  // All allocated pages are full but the last one.
  const std::int64_t last = position_ % shape().page_tokens;
  if (position_ == 0) return 0;
  const std::int64_t end_page = (position_ - 1) / shape().page_tokens;
  if (table_[static_cast<std::size_t>(end_page)] < 0)
    return allocated_ * shape().page_tokens;  // window 1 at a page's end
  return allocated_ * shape().page_tokens - (last == 0 ? 0 : shape().page_tokens - last);
}

std::int64_t Cache::ring_offset() const {
  return first_recent() % shape().page_tokens;
}

}  // namespace basin::kv
