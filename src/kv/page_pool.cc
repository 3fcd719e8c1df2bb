#include "kv/page_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

void convert(const float* from, std::byte* to, std::int64_t count, DType dtype) {
  if (dtype == DType::f32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
    return;
  }
  bf16* out = reinterpret_cast<bf16*>(to);
  for (std::int64_t i = 0; i < count; ++i) out[i] = to_bf16(from[i]);
}

}  // namespace

PagePool::PagePool(const Shape& shape, std::int64_t limit_pages) : shape_(shape), pages_(limit_pages) {
  if (shape.dtype != DType::f32 && shape.dtype != DType::bf16) {
    throw Error(ErrorCode::unsupported,
                fmt::format("a cache of {}; supported are f32 and bf16", name(shape.dtype)));
  }
  if (shape.layers < 1 || shape.h_kv < 1 || shape.d_head < 1 || shape.page_tokens < 1 ||
      shape.d_value < Shape::kAsKeys || shape.d_index < 0) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("a cache of {} layers, {} heads of {} and pages of {} tokens; all must be positive",
                    shape.layers, shape.h_kv, shape.d_head, shape.page_tokens));
  }
  if (limit_pages < 1 || limit_pages > kUnlimited) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("a pool of {} pages; allowed are 1 to {}", limit_pages, kUnlimited));
  }
  for (std::int64_t i = 0; i < shape.layers; ++i) layers_.push_back(std::make_unique<Layer>());
}

std::int32_t PagePool::take() {
  if (pages_.next() == capacity_pages_) grow();
  return pages_.take();
}

// The capacity counts only when every layer has it: one that the system refuses must leave none behind the others.
void PagePool::grow() {
  const std::int64_t pages = std::min(pages_.limit(), std::max<std::int64_t>(16, capacity_pages_ * 2));
  for (const auto& layer : layers_) {
    for (const Part& part : parts()) {
      if (part.floats > 0) (layer.get()->*part.region).grow(pages * part_bytes(part));
    }
  }
  capacity_pages_ = pages;
}

void PagePool::release(std::int32_t page) {
  if (pages_.release(page)) poison(page);
}

void PagePool::forget(std::int32_t page) {
  if (pages_.forget(page)) poison(page);
}

void PagePool::poison(std::int32_t page) {
  if (!poisons_) return;
  for (const auto& layer : layers_) {  // all bits set is a NaN in float and in bf16
    for (const Part& part : parts()) {
      const std::int64_t bytes = part_bytes(part);
      if (bytes > 0)
        std::memset((layer.get()->*part.region).data() + page * bytes, 0xff, static_cast<std::size_t>(bytes));
    }
  }
}

void PagePool::write(std::int64_t layer, std::int64_t row, const Row& from) {
  Layer& to = *layers_[static_cast<std::size_t>(layer)];
  const float* sources[] = {from.k, from.v, from.index};
  for (std::size_t i = 0; i < std::size(sources); ++i) {
    const Part part = parts()[i];
    if (part.floats == 0) continue;
    convert(sources[i], (to.*part.region).data() + row * part.floats * block_bytes(shape_.dtype), part.floats,
            shape_.dtype);
  }
}

void PagePool::copy_out(std::int32_t page, std::byte* to) const {
  for (const auto& layer : layers_) {
    for (const Part& part : parts()) {
      const std::int64_t bytes = part_bytes(part);
      if (bytes == 0) continue;
      std::memcpy(to, (layer.get()->*part.region).data() + page * bytes, static_cast<std::size_t>(bytes));
      to += bytes;
    }
  }
}

void PagePool::copy_in(std::int32_t page, const std::byte* from) {
  for (const auto& layer : layers_) {
    for (const Part& part : parts()) {
      const std::int64_t bytes = part_bytes(part);
      if (bytes == 0) continue;
      std::memcpy((layer.get()->*part.region).data() + page * bytes, from, static_cast<std::size_t>(bytes));
      from += bytes;
    }
  }
}

ConstView PagePool::view(const Region& region, std::int64_t heads, std::int64_t d) const {
  const void* data = region.data();
  return contiguous(data, shape_.dtype, {pages_.used(), shape_.page_tokens, heads, d});
}

ConstView PagePool::keys(std::int64_t layer) const {
  return view(layers_[static_cast<std::size_t>(layer)]->k, shape_.h_kv, shape_.d_head);
}

ConstView PagePool::values(std::int64_t layer) const {
  return view(layers_[static_cast<std::size_t>(layer)]->v, shape_.h_kv, shape_.value_floats() / shape_.h_kv);
}

ConstView PagePool::index_keys(std::int64_t layer) const {
  return view(layers_[static_cast<std::size_t>(layer)]->index, 1, shape_.d_index);
}

}  // namespace basin::kv
