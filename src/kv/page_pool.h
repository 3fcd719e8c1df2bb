// The memory of pages: keys and values of every layer, for all sequences that share the pool.
#pragma once

#include <array>
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
  std::int64_t d_value = kAsKeys;  // of values; 0: none are kept, since they are part of the keys (a latent)
  std::int64_t d_index = 0;        // of a further key per token, which an indexer scores; 0: none

  static constexpr std::int64_t kAsKeys = -1;

  // What one token has in a layer.
  std::int64_t key_floats() const { return h_kv * d_head; }
  std::int64_t value_floats() const { return h_kv * (d_value == kAsKeys ? d_head : d_value); }
  std::int64_t row_floats() const { return key_floats() + value_floats() + d_index; }
  std::int64_t page_bytes() const { return layers * page_tokens * row_floats() * block_bytes(dtype); }
};

class PagePool {
 public:
  static constexpr std::int64_t kUnlimited = std::int64_t{1} << 30;

  /// Memory is taken as pages are used, up to `limit_pages`, and kept. Throws Error(invalid_argument | unsupported).
  explicit PagePool(const Shape& shape, std::int64_t limit_pages = kUnlimited);

  const Shape& shape() const { return shape_; }
  const Pages& pages() const { return pages_; }
  Pages& pages() { return pages_; }  // not for what follows, which knows the memory

  std::int32_t take();
  void release(std::int32_t page);
  void forget(std::int32_t page);

  /// For tests: pages are filled with NaN when they become free, so that any stale read shows.
  void poison_freed_pages(bool on) { poisons_ = on; }

  /// One token of a layer: keys [h_kv, d_head], values [h_kv, d_value], index key [d_index]. Null where the shape has none.
  struct Row {
    const float *k, *v, *index;
  };
  /// Writes it to row `row` (page * page_tokens + offset).
  void write(std::int64_t layer, std::int64_t row, const Row& from);

  /// A page's content, all layers, keys then values then index keys of each: [page_bytes].
  void copy_out(std::int32_t page, std::byte* to) const;
  void copy_in(std::int32_t page, const std::byte* from);

  ConstView keys(std::int64_t layer) const;        // [pages, page_tokens, h_kv, d_head]
  ConstView values(std::int64_t layer) const;      // [pages, page_tokens, h_kv, d_value]
  ConstView index_keys(std::int64_t layer) const;  // [pages, page_tokens, 1, d_index]

 private:
  struct Layer {
    Region k, v, index;
  };
  // A region of a layer and what a token has there.
  struct Part {
    Region Layer::*region;
    std::int64_t floats;
  };
  std::array<Part, 3> parts() const {
    return {{{&Layer::k, shape_.key_floats()},
             {&Layer::v, shape_.value_floats()},
             {&Layer::index, shape_.d_index}}};
  }
  std::int64_t part_bytes(const Part& part) const {  // of one page
    return shape_.page_tokens * part.floats * block_bytes(shape_.dtype);
  }
  ConstView view(const Region& region, std::int64_t heads, std::int64_t d) const;
  void grow();
  void poison(std::int32_t page);

  Shape shape_;
  Pages pages_;
  bool poisons_ = false;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::int64_t capacity_pages_ = 0;  // pages the regions have room for
};

}  // namespace basin::kv
