// The memory of pages: keys and values of every layer, for all sequences that share the pool.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "basin/base/dtype.h"
#include "basin/tensor/view.h"
#include "kv/pages.h"
#include "kv/region.h"

namespace basin::kv {

struct Shape {
  std::int64_t layers = 0;
  std::int64_t h_kv = 0;
  std::int64_t d_head = 0;
  DType dtype = DType::f32;  // f32 or bf16
  std::int64_t page_tokens = 16;

  std::int64_t row_bytes() const {
    return h_kv * d_head * block_bytes(dtype);
  }  // of one token's keys in a layer
  std::int64_t page_bytes() const { return 2 * layers * page_tokens * row_bytes(); }
};

class PagePool {
 public:
  static constexpr std::int64_t kUnlimited = std::int64_t{1} << 30;

  /// Memory is taken as pages are used, up to `limit_pages`, and kept. Throws Error(invalid_argument | unsupported).
  explicit PagePool(const Shape& shape, std::int64_t limit_pages = kUnlimited);

  const Shape& shape() const { return shape_; }
  const Pages& pages() const { return pages_; }
  Pages& pages() { return pages_; }  // not for take() and release(), which know the memory

  std::int32_t take();
  void release(std::int32_t page);

  /// For tests: pages are filled with NaN when they become free, so that any stale read shows.
  void poison_freed_pages(bool on) { poison_ = on; }

  /// Writes one token's keys and values [h_kv, d_head] of a layer to row `row` (page * page_tokens + offset).
  void write(std::int64_t layer, std::int64_t row, const float* k, const float* v);

  /// A page's content, all layers, keys then values of each: [page_bytes].
  void copy_out(std::int32_t page, std::byte* to) const;
  void copy_in(std::int32_t page, const std::byte* from);

  ConstView keys(std::int64_t layer) const;    // [pages, page_tokens, h_kv, d_head]
  ConstView values(std::int64_t layer) const;  // same

 private:
  struct Layer {
    Region k, v;
  };
  void grow();

  Shape shape_;
  Pages pages_;
  bool poison_ = false;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::int64_t capacity_pages_ = 0;  // pages the regions have room for
};

}  // namespace basin::kv
