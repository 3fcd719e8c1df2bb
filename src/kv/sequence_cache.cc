#include "kv/sequence_cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"

namespace basin::kv {

SequenceCache::SequenceCache(std::shared_ptr<PagePool> pool, const Policy& request,
                             std::span<const std::int64_t> windows) {
  const auto count = [&](std::int64_t window) { return std::count(windows.begin(), windows.end(), window); };
  Shape shape = pool->shape();
  if (shape.layers != count(0)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("pages of {} layers for {} with full attention", shape.layers, count(0)));
  }
  caches_.push_back(std::make_unique<Cache>(std::move(pool), request));
  std::vector<std::int64_t> kinds = {0};  // the window of each cache
  std::vector<std::int64_t> used = {0};   // layers placed in each cache
  for (const std::int64_t window : windows) {
    const auto found = std::find(kinds.begin(), kinds.end(), window);
    const auto kind = static_cast<std::size_t>(found - kinds.begin());
    if (found == kinds.end()) {
      kinds.push_back(window);
      used.push_back(0);
      shape.layers = count(window);
      caches_.push_back(std::make_unique<Cache>(shape, Policy{0, window, false}));
    }
    places_.push_back({caches_[kind].get(), used[kind]++});
  }
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
