// Keys and values of one sequence, on pages, in the layers that share a sink-window policy. Keys are written once and never
// moved or rotated again; the page table is indexed by logical page, so positions stay absolute and evicted pages are -1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "basin/attention/spec.h"
#include "kv/page_pool.h"

namespace basin::kv {

/// What stays visible: the first sink_tokens tokens and the last `window`, counting the query itself.
struct Policy {
  std::int64_t sink_tokens = 0;
  std::int64_t window = 0;  // 0 = everything stays
  bool in_cache_positions = false;
};

/// Most pages a stream can hold while a step of `step_tokens` runs; window must be set.
std::int64_t page_bound(const Policy& policy, std::int64_t page_tokens, std::int64_t step_tokens);

/// Whether a query at `position` or later sees a token of logical page `page`, which begins before it.
bool needs_page(const Policy& policy, std::int64_t page_tokens, std::int64_t page, std::int64_t position);

class Cache {
 public:
  /// On pages of its own.
  Cache(const Shape& shape, const Policy& policy) : Cache(std::make_shared<PagePool>(shape), policy) {}
  /// On pages that it shares with other sequences: a held page may have several owners, and is written by none but the
  /// one that fills it.
  Cache(std::shared_ptr<PagePool> pool, const Policy& policy);
  ~Cache();
  Cache(Cache&&) = default;
  Cache& operator=(Cache&&) = delete;

  /// For tests: pages are filled with NaN when they are freed, so that any stale read shows.
  void poison_freed_pages(bool on) { pool_->poison_freed_pages(on); }

  /// Starts an empty cache with the first `tokens` tokens, which other sequences have computed under the same mask.
  /// `pages` [ceil(tokens / page_tokens)]; -1 where no later query sees any token. The cache becomes an owner of whole pages.
  /// Of a last one whose other rows it will write it has a copy, which copy_in() gives a page.
  void adopt(std::span<const std::int32_t> pages, std::int64_t tokens);

  /// Gives all pages back and keeps a copy of what they hold, until copy_in() takes new pages for it. In between nothing
  /// may begin. copy_in may throw, and then nothing has changed.
  void copy_out();
  void copy_in();
  /// Pages that copy_in() takes.
  std::int64_t copied_pages() const { return static_cast<std::int64_t>(copied_.size()); }

  /// Allocates rows for the next `tokens` positions. Every layer's `append` follows, then end_step. When it throws, there
  /// is no step.
  void begin_step(std::int64_t tokens);
  /// Frees the pages that no later query can see.
  void end_step();
  /// Takes the step back: its tokens were never read. Nothing happens outside of a step.
  void abandon_step();

  /// Writes the step's keys (rotated) and values of a layer: k [tokens, h_kv, d_head], v [tokens, h_kv, d_value], index
  /// [tokens, d_index], dense. Null where the shape has none.
  void append(std::int64_t layer, const float* k, const float* v, const float* index = nullptr);

  attention::Mask mask() const { return {true, policy_.window, -1, policy_.sink_tokens}; }
  const Policy& policy() const { return policy_; }
  const Shape& shape() const { return pool_->shape(); }
  PagePool& pool() const { return *pool_; }
  ConstView keys(std::int64_t layer) const {
    return pool_->keys(layer);
  }  // [pages, page_tokens, h_kv, d_head]
  ConstView values(std::int64_t layer) const {
    return pool_->values(layer);
  }  // [pages, page_tokens, h_kv, d_value]
  ConstView index_keys(std::int64_t layer) const {
    return pool_->index_keys(layer);
  }                                                            // [pages, page_tokens, 1, d_index]
  const std::int32_t* pages() const { return table_.data(); }  // [ceil(end of step / page_tokens)]
  std::span<const std::int32_t> page_table() const { return table_; }

  std::int64_t logical_position() const {
    return position_;
  }  // of the step's first token; after end_step: tokens seen
  std::int64_t step_tokens() const { return step_; }
  /// Rows that the query at position p sees.
  std::int64_t visible_tokens(std::int64_t p) const;

  std::int64_t cache_position() const;  // of the next token, among those it will see
  std::int64_t write_slot() const;      // physical row of the next token
  std::int64_t kept_tokens() const;     // rows physically held
  std::int64_t ring_offset() const;     // first recent token of the next query, within its page
  std::int64_t allocated_pages() const { return allocated_; }
  std::int64_t kept_tokens_max() const { return kept_tokens_max_; }
  /// A page that no later query sees, and what it holds.
  struct LeftPage {
    std::int64_t logical = 0;
    std::int32_t page = -1;
  };
  /// From now on end_step does not free such pages but leaves them here, until free_left_window(): someone may want to keep
  /// what they hold.
  void hold_left_window() { holds_left_window_ = true; }
  std::span<const LeftPage> left_window() const { return left_window_; }
  void free_left_window();
  std::int64_t kv_bytes() const { return allocated_ * shape().page_bytes(); }
  std::int64_t kv_bytes_max() const { return allocated_max_ * shape().page_bytes(); }

 private:
  std::int64_t first_recent() const;  // first window token of the query at position_
  std::int32_t take_page();
  void free_page(std::int32_t page);

  std::shared_ptr<PagePool> pool_;  // null once moved from
  Policy policy_;
  std::vector<std::int32_t> table_;  // logical page -> page, -1 = evicted
  std::vector<std::size_t> copied_;  // logical pages, in the order of copy_
  std::vector<std::byte> copy_;      // [copied pages, page_bytes]
  std::int64_t position_ = 0;
  std::int64_t step_ = 0;
  std::int64_t evicted_before_ = 0;  // logical pages below this (and beyond the sinks) are evicted
  std::int64_t allocated_ = 0, allocated_max_ = 0, kept_tokens_max_ = 0;
  bool holds_left_window_ = false;
  std::vector<LeftPage> left_window_;
};

}  // namespace basin::kv
