#include "kv/cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

void convert(const float* from, std::byte* to, std::int64_t count, DType dtype) {
  if (dtype == DType::f32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
    return;
  }
  bf16* out = reinterpret_cast<bf16*>(to);
  for (std::int64_t i = 0; i < count; ++i) out[i] = to_bf16(from[i]);
}

}  // namespace

std::int64_t page_bound(const Policy& policy, std::int64_t page_tokens, std::int64_t step_tokens) {
  return ceil_div(policy.sink_tokens, page_tokens) + ceil_div(policy.window + step_tokens - 2, page_tokens) +
         1;
}

Cache::Cache(const Shape& shape, const Policy& policy) : shape_(shape), policy_(policy) {
  if (shape.dtype != DType::f32 && shape.dtype != DType::bf16) {
    throw Error(ErrorCode::unsupported,
                fmt::format("a cache of {}; supported are f32 and bf16", name(shape.dtype)));
  }
  if (shape.layers < 1 || shape.h_kv < 1 || shape.d_head < 1 || shape.page_tokens < 1) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("a cache of {} layers, {} heads of {} and pages of {} tokens; all must be positive",
                    shape.layers, shape.h_kv, shape.d_head, shape.page_tokens));
  }
  if (policy.sink_tokens < 0 || policy.window < 0 || (policy.window == 0 && policy.sink_tokens > 0)) {
    throw Error(ErrorCode::invalid_argument, fmt::format("sink_tokens {} with window {}; sinks need a window",
                                                         policy.sink_tokens, policy.window));
  }
  for (std::int64_t i = 0; i < shape.layers; ++i) layers_.push_back(std::make_unique<Layer>());
}

std::int32_t Cache::take_page() {
  std::int32_t page = 0;
  if (!free_.empty()) {
    page = free_.back();
    free_.pop_back();
  } else {
    if (used_pages_ == capacity_pages_) grow();
    page = static_cast<std::int32_t>(used_pages_++);
  }
  allocated_max_ = std::max(allocated_max_, ++allocated_);
  return page;
}

// The capacity counts only when every layer has it: one that the system refuses must leave none behind the others.
void Cache::grow() {
  const std::int64_t pages = std::max<std::int64_t>(16, capacity_pages_ * 2);
  free_.reserve(static_cast<std::size_t>(pages));  // so that freeing never allocates
  for (const auto& layer : layers_) {
    layer->k.grow(pages * shape_.page_tokens * row_bytes());
    layer->v.grow(pages * shape_.page_tokens * row_bytes());
  }
  capacity_pages_ = pages;
}

void Cache::free_page(std::int32_t page) {
  --allocated_;
  free_.push_back(page);
  if (!poison_) return;
  const std::int64_t bytes = shape_.page_tokens * row_bytes();
  for (const auto& layer : layers_) {  // all bits set is a NaN in float and in bf16
    std::memset(layer->k.data() + page * bytes, 0xff, static_cast<std::size_t>(bytes));
    std::memset(layer->v.data() + page * bytes, 0xff, static_cast<std::size_t>(bytes));
  }
}

void Cache::begin_step(std::int64_t tokens) {
  if (tokens < 1 || step_ != 0)
    throw Error(ErrorCode::internal, fmt::format("a step of {} tokens inside a step of {}", tokens, step_));
  const std::int64_t pages = ceil_div(position_ + tokens, shape_.page_tokens);
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
  const std::int64_t pages = ceil_div(position_, shape_.page_tokens);
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
      first_recent() / shape_.page_tokens;  // logical page of the oldest window token
  const std::int64_t sink_pages = ceil_div(policy_.sink_tokens, shape_.page_tokens);
  std::int64_t page = std::max(evicted_before_, sink_pages);
  for (; page < std::min<std::int64_t>(keep_from, static_cast<std::int64_t>(table_.size())); ++page) {
    free_page(table_[static_cast<std::size_t>(page)]);
    table_[static_cast<std::size_t>(page)] = -1;
  }
  evicted_before_ = std::max(evicted_before_, page);
}

void Cache::append(std::int64_t layer, const float* k, const float* v) {
  Layer& to = *layers_[static_cast<std::size_t>(layer)];
  const std::int64_t row_floats = shape_.h_kv * shape_.d_head;
  for (std::int64_t t = 0; t < step_; ++t) {
    const std::int64_t p = position_ + t;
    const std::int64_t row = table_[static_cast<std::size_t>(p / shape_.page_tokens)] * shape_.page_tokens +
                             p % shape_.page_tokens;
    convert(k + t * row_floats, to.k.data() + row * row_bytes(), row_floats, shape_.dtype);
    convert(v + t * row_floats, to.v.data() + row * row_bytes(), row_floats, shape_.dtype);
  }
}

ConstView Cache::keys(std::int64_t layer) const {
  const void* data = layers_[static_cast<std::size_t>(layer)]->k.data();
  return contiguous(data, shape_.dtype, {used_pages_, shape_.page_tokens, shape_.h_kv, shape_.d_head});
}

ConstView Cache::values(std::int64_t layer) const {
  const void* data = layers_[static_cast<std::size_t>(layer)]->v.data();
  return contiguous(data, shape_.dtype, {used_pages_, shape_.page_tokens, shape_.h_kv, shape_.d_head});
}

std::int64_t Cache::first_recent() const {
  return policy_.window == 0 ? 0 : std::max<std::int64_t>(0, position_ - policy_.window + 1);
}

std::int64_t Cache::visible_tokens(std::int64_t p) const {
  if (policy_.window == 0 || p < policy_.window + policy_.sink_tokens) return p + 1;
  return policy_.window + policy_.sink_tokens;
}

std::int64_t Cache::cache_position() const {
  return visible_tokens(position_) - 1;
}

std::int64_t Cache::write_slot() const {
  const std::int64_t page = position_ / shape_.page_tokens;
  std::int64_t physical = used_pages_;  // the page that take_page would hand out
  if (page < static_cast<std::int64_t>(table_.size())) {
    physical = table_[static_cast<std::size_t>(page)];
  } else if (!free_.empty()) {
    physical = free_.back();
  }
  return physical * shape_.page_tokens + position_ % shape_.page_tokens;
}

std::int64_t Cache::kept_tokens() const {
  // All allocated pages are full but the last one.
  const std::int64_t last = position_ % shape_.page_tokens;
  if (position_ == 0) return 0;
  const std::int64_t end_page = (position_ - 1) / shape_.page_tokens;
  if (table_[static_cast<std::size_t>(end_page)] < 0)
    return allocated_ * shape_.page_tokens;  // window 1 at a page's end
  return allocated_ * shape_.page_tokens - (last == 0 ? 0 : shape_.page_tokens - last);
}

std::int64_t Cache::ring_offset() const {
  return first_recent() % shape_.page_tokens;
}

}  // namespace basin::kv
