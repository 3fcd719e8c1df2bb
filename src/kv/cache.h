// Keys and values of one sequence, on pages, under the sink-window policy. Keys are written once and never moved or
// rotated again; the page table is indexed by logical page, so positions stay absolute and evicted pages are -1.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "basin/attention/spec.h"
#include "basin/base/dtype.h"
#include "kv/region.h"

namespace basin::kv {

/// What stays visible: the first sink_tokens tokens and the last `window`, counting the query itself.
struct Policy {
  std::int64_t sink_tokens = 0;
  std::int64_t window = 0;  // 0 = everything stays
  bool in_cache_positions = false;
};

struct Shape {
  std::int64_t layers = 0;
  std::int64_t h_kv = 0;
  std::int64_t d_head = 0;
  DType dtype = DType::f32;  // f32 or bf16
  std::int64_t page_tokens = 16;
};

/// Most pages a stream can hold while a step of `step_tokens` runs; window must be set.
std::int64_t page_bound(const Policy& policy, std::int64_t page_tokens, std::int64_t step_tokens);

class Cache {
 public:
  Cache(const Shape& shape, const Policy& policy);

  /// For tests: pages are filled with NaN when they are freed, so that any stale read shows.
  void poison_freed_pages(bool on) { poison_ = on; }

  /// Allocates rows for the next `tokens` positions. Every layer's `append` follows, then end_step. When it throws, there
  /// is no step.
  void begin_step(std::int64_t tokens);
  /// Frees the pages that no later query can see.
  void end_step();
  /// Takes the step back: its tokens were never read. Nothing happens outside of a step.
  void abandon_step();

  /// Writes the step's keys (rotated) and values of a layer: k, v [tokens, h_kv, d_head], dense.
  void append(std::int64_t layer, const float* k, const float* v);

  attention::Mask mask() const { return {true, policy_.window, -1, policy_.sink_tokens}; }
  const Policy& policy() const { return policy_; }
  const Shape& shape() const { return shape_; }
  ConstView keys(std::int64_t layer) const;                    // [pages, page_tokens, h_kv, d_head]
  ConstView values(std::int64_t layer) const;                  // same
  const std::int32_t* pages() const { return table_.data(); }  // [ceil(end of step / page_tokens)]

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
  std::int64_t kv_bytes_max() const { return allocated_max_ * page_bytes(); }

 private:
  struct Layer {
    Region k, v;
  };
  std::int64_t row_bytes() const { return shape_.h_kv * shape_.d_head * block_bytes(shape_.dtype); }
  std::int64_t page_bytes() const { return 2 * shape_.layers * shape_.page_tokens * row_bytes(); }
  std::int64_t first_recent() const;  // first window token of the query at position_
  std::int32_t take_page();
  void grow();
  void free_page(std::int32_t page);

  Shape shape_;
  Policy policy_;
  bool poison_ = false;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<std::int32_t> table_;  // logical page -> page, -1 = evicted
  std::vector<std::int32_t> free_;   // recycled pages, last in first out
  std::int64_t capacity_pages_ = 0;  // pages the regions have room for
  std::int64_t used_pages_ = 0;      // pages ever handed out
  std::int64_t position_ = 0;
  std::int64_t step_ = 0;
  std::int64_t evicted_before_ = 0;  // logical pages below this (and beyond the sinks) are evicted
  std::int64_t allocated_ = 0, allocated_max_ = 0, kept_tokens_max_ = 0;
};

/// A step that is abandoned unless it ends: a pass that throws leaves the cache as it was.
class Step {
 public:
  Step(Cache& cache, std::int64_t tokens) : cache_(cache) { cache_.begin_step(tokens); }
  ~Step() { cache_.abandon_step(); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  void end() { cache_.end_step(); }

 private:
  Cache& cache_;
};

}  // namespace basin::kv
