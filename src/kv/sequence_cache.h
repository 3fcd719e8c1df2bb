// Keys and values of one sequence over all layers of a model. Layers that keep the same tokens share a page table; a layer
// with a window of its own keeps a small ring, whatever the others keep.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/cache.h"

namespace basin::kv {

class SequenceCache {
 public:
  /// `windows` [layers of the model]: each layer's own window at absolute positions, which gets no sink tokens; 0 = full
  /// attention, on which `request` acts. `pool` [layers with full attention, at least one] may be shared with other
  /// sequences; rings lie in memory of the sequence's own.
  SequenceCache(std::shared_ptr<PagePool> pool, const Policy& request, std::span<const std::int64_t> windows);

  /// Where a layer's keys and values lie: cache->append(index, ...), cache->keys(index), ...
  struct Place {
    Cache* cache = nullptr;  // not null
    std::int64_t index = 0;  // of the layer, among those that share the cache
  };
  const Place& layer(std::int64_t i) const { return places_[static_cast<std::size_t>(i)]; }

  /// The layers with full attention, on which the request's policy acts.
  const Cache& full() const { return *caches_.front(); }
  Cache& full() { return *caches_.front(); }

  /// Whether what full() holds of a text is all that there is, so that other sequences can go on from it.
  bool is_full_alone() const { return caches_.size() == 1; }

  /// As in Cache, for all layers together. When begin_step throws, there is no step.
  void begin_step(std::int64_t tokens);
  void end_step();
  void abandon_step();

  std::int64_t logical_position() const { return full().logical_position(); }
  DType dtype() const { return full().shape().dtype; }
  std::int64_t kv_bytes_max() const {
    return kv_bytes_max_;
  }  // peak of allocated pages of all layers together

  /// For tests: see Cache.
  void poison_freed_pages(bool on);

 private:
  std::vector<std::unique_ptr<Cache>> caches_;  // full attention, then one for each window that occurs
  std::vector<Place> places_;                   // [layers]
  std::int64_t kv_bytes_max_ = 0;
};

/// A step of some sequences that is abandoned unless it ends: a pass that throws leaves their caches as they were.
class Step {
 public:
  Step() = default;
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  /// The cache must be in no step.
  void begin(SequenceCache& cache, std::int64_t tokens);
  void end();

 private:
  std::vector<SequenceCache*> caches_;
};

}  // namespace basin::kv
