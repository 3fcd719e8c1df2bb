#include "kv/sequence_cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"

namespace basin::kv {

std::vector<LayerKind> layer_kinds(std::span<const std::int64_t> windows, Shape shape, LayerRows rows) {
  std::vector<std::int64_t> found = {0};
  for (const std::int64_t window : windows) {
    if (std::ranges::find(found, window) == found.end()) found.push_back(window);
  }
  std::vector<LayerKind> kinds;
  for (const std::int64_t window : found) {
    shape.layers = rows == LayerRows::shared ? 1 : std::ranges::count(windows, window);
    kinds.push_back({window, std::make_shared<PagePool>(shape), rows});
  }
  return kinds;
}

SequenceCache::SequenceCache(std::span<const LayerKind> kinds, const Policy& request,
                             std::span<const std::int64_t> windows) {
  for (const LayerKind& kind : kinds) {
    const std::int64_t layers = kind.rows == LayerRows::shared ? 1 : std::ranges::count(windows, kind.window);
    if (kind.pool->shape().layers != layers) {
      throw Error(ErrorCode::invalid_argument, fmt::format("pages of {} layers for {} with a window of {}",
                                                           kind.pool->shape().layers, layers, kind.window));
    }
    caches_.push_back(std::make_unique<Cache>(kind.pool, kind.policy(request)));
  }
  std::vector<std::int64_t> used(kinds.size(), 0);  // layers placed in each cache
  for (const std::int64_t window : windows) {
    const auto kind = std::ranges::find(kinds, window, &LayerKind::window);
    if (kind == kinds.end())
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("no pages for layers with a window of {}", window));
    const auto index = static_cast<std::size_t>(kind - kinds.begin());
    places_.push_back({caches_[index].get(), kind->rows == LayerRows::shared ? 0 : used[index]++});
  }
}

SequenceCache::SequenceCache(std::shared_ptr<PagePool> pool, const Policy& request,
                             std::span<const std::int64_t> windows)
    : SequenceCache(
          [&] {
            std::vector<LayerKind> kinds = layer_kinds(windows, pool->shape());
            kinds.front().pool = std::move(pool);
            return kinds;
          }(),
          request, windows) {}

void SequenceCache::hold_left_window() {
  for (const auto& cache : caches_) cache->hold_left_window();
}

void SequenceCache::adopt(std::span<const std::vector<std::int32_t>> pages, std::int64_t tokens) {
  for (std::size_t i = 0; i < pages.size(); ++i) caches_[i]->adopt(pages[i], tokens);
}

void SequenceCache::copy_out() {
  for (const auto& cache : caches_) cache->copy_out();
}

void SequenceCache::copy_in() {
  for (const auto& cache : caches_) cache->copy_in();
}

void SequenceCache::begin_step(std::int64_t tokens) {
  std::size_t begun = 0;
  try {
    for (; begun < caches_.size(); ++begun) caches_[begun]->begin_step(tokens);
  } catch (...) {
    for (std::size_t i = 0; i < begun; ++i) caches_[i]->abandon_step();
    throw;
  }
  std::int64_t bytes = 0;
  for (const auto& cache : caches_) bytes += cache->kv_bytes();
  kv_bytes_max_ = std::max(kv_bytes_max_, bytes);
}

void SequenceCache::end_step() {
  for (const auto& cache : caches_) cache->end_step();
}

void SequenceCache::abandon_step() {
  for (const auto& cache : caches_) cache->abandon_step();
}

void SequenceCache::poison_freed_pages(bool on) {
  for (const auto& cache : caches_) cache->poison_freed_pages(on);
}

Step::~Step() {
  for (SequenceCache* cache : caches_) cache->abandon_step();
}

void Step::begin(SequenceCache& cache, std::int64_t tokens) {
  caches_.reserve(caches_.size() + 1);  // nothing may fail between the two
  cache.begin_step(tokens);
  caches_.push_back(&cache);
}

void Step::end() {
  for (SequenceCache* cache : caches_) cache->end_step();
  caches_.clear();
}

}  // namespace basin::kv
