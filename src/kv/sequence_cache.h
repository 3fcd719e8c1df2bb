// Keys and values of one sequence over all layers of a model. Layers that keep the same tokens share a page table; a layer
// with a window of its own keeps a small ring, whatever the others keep.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/cache.h"

namespace basin::kv {

/// Whose rows a layer writes: its own, or the ones that the layer before it has left. The latter is for a text that is read in
/// one step by someone who looks at one layer after another: nothing can be read behind it.
enum class LayerRows { own, shared };

/// Layers that keep the same tokens, and the pages that they keep them on, which sequences share.
struct LayerKind {
  std::int64_t window = 0;  // of their own, at absolute positions and without sink tokens; 0 = full attention
  std::shared_ptr<PagePool> pool;
  LayerRows rows = LayerRows::own;  // shared: the pool has one layer

  /// What such layers keep of a sequence: the request's policy acts on those with full attention.
  Policy policy(const Policy& request) const { return window == 0 ? request : Policy{0, window, false}; }
};

/// The kinds that `windows` [layers of the model] name: full attention, of which there is a layer at least, then each window
/// in the order in which it comes. `shape` is that of the pages, whatever its layers; pools without limit.
std::vector<LayerKind> layer_kinds(std::span<const std::int64_t> windows, Shape shape,
                                   LayerRows rows = LayerRows::own);

class SequenceCache {
 public:
  /// `kinds` are those of `windows`.
  SequenceCache(std::span<const LayerKind> kinds, const Policy& request,
                std::span<const std::int64_t> windows);

  /// Layers with windows of their own on pages of the sequence's own.
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

  /// Of each kind of layers, full attention first.
  std::size_t kinds() const { return caches_.size(); }
  Cache& kind(std::size_t i) { return *caches_[i]; }
  const Cache& kind(std::size_t i) const { return *caches_[i]; }

  /// As in Cache, for all layers together; `pages` of each kind, or none at all.
  void hold_left_window();
  void adopt(std::span<const std::vector<std::int32_t>> pages, std::int64_t tokens);
  void copy_out();
  void copy_in();
  std::int64_t copied_pages() const { return full().copied_pages(); }  // of full attention

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
  std::vector<std::unique_ptr<Cache>> caches_;  // of each kind
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
