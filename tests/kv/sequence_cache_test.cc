// Layers with windows of their own beside layers on which a request's policy acts: each keeps what it needs, no more.
#include "kv/sequence_cache.h"

#include <gtest/gtest.h>

#include <vector>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

constexpr std::int64_t kPage = 4, kStep = 3, kRowBytes = 2 * 4;
const std::int64_t kWindows[] = {6, 0, 6, 0, 9};  // two kinds of local layers, and full ones

SequenceCache make(const Policy& request) {
  return {layer_kinds(kWindows, {2, 1, 2, DType::f32, kPage}), request, kWindows};
}

// Token p of layer l is written as k = (p, l).
void write_step(SequenceCache& cache, std::int64_t tokens) {
  const std::int64_t first = cache.logical_position();
  for (std::int64_t layer = 0; layer < 5; ++layer) {
    std::vector<float> rows;
    for (std::int64_t t = 0; t < tokens; ++t)
      rows.insert(rows.end(), {static_cast<float>(first + t), static_cast<float>(layer)});
    cache.layer(layer).cache->append(cache.layer(layer).index, rows.data(), rows.data());
  }
}

TEST(SequenceCache, EveryLayerKeepsWhatItsOwnWindowNeeds) {
  const Policy request{2, 20, true};
  SequenceCache cache = make(request);
  std::int64_t bytes_max = 0;
  for (int i = 0; i < 60; ++i) {
    cache.begin_step(kStep);
    write_step(cache, kStep);
    std::int64_t bytes = 0;
    for (const std::int64_t layer : {0, 1, 4}) {
      const Cache& kept = *cache.layer(layer).cache;
      const Policy want = kWindows[layer] == 0 ? request : Policy{0, kWindows[layer], false};
      EXPECT_EQ(kept.mask().window, want.window);
      EXPECT_EQ(kept.mask().sink_tokens, want.sink_tokens);
      EXPECT_EQ(kept.policy().in_cache_positions, want.in_cache_positions);
      ASSERT_LE(kept.allocated_pages(), page_bound(want, kPage, kStep)) << "layer " << layer;
      EXPECT_EQ(kept.logical_position(), cache.logical_position());
      bytes += kept.allocated_pages() * kPage * 2 * kRowBytes * kept.shape().layers;
    }
    bytes_max = std::max(bytes_max, bytes);
    // What the newest query sees has the values of its own layer.
    for (std::int64_t layer = 0; layer < 5; ++layer) {
      const auto [kept, index] = cache.layer(layer);
      const std::int64_t last = cache.logical_position() + kStep - 1;
      const auto* k = static_cast<const float*>(kept->keys(index).data);
      for (std::int64_t j = std::max<std::int64_t>(0, last - kept->policy().window + 1); j <= last; ++j) {
        const std::int64_t row = kept->pages()[j / kPage] * kPage + j % kPage;
        ASSERT_EQ(k[row * 2], static_cast<float>(j));
        ASSERT_EQ(k[row * 2 + 1], static_cast<float>(layer));
      }
    }
    cache.end_step();
  }
  EXPECT_EQ(cache.logical_position(), 180);
  EXPECT_EQ(cache.kv_bytes_max(), bytes_max);
  EXPECT_EQ(&cache.full(), cache.layer(1).cache);
  EXPECT_EQ(cache.layer(0).cache, cache.layer(2).cache);
  EXPECT_EQ(cache.layer(1).cache, cache.layer(3).cache);
  EXPECT_NE(cache.layer(0).cache, cache.layer(4).cache);
}

TEST(SequenceCache, WithoutARequestsWindowOnlyFullLayersGrow) {
  SequenceCache cache = make({});
  for (int i = 0; i < 100; ++i) {
    cache.begin_step(kStep);
    write_step(cache, kStep);
    cache.end_step();
  }
  EXPECT_EQ(cache.layer(1).cache->kept_tokens(), 300);
  EXPECT_LE(cache.layer(0).cache->kept_tokens(), 6 + kPage);
  EXPECT_LE(cache.layer(4).cache->kept_tokens(), 9 + kPage);
}

// Memory of one layer of each kind, whatever their number.
TEST(SequenceCache, LayersMayWriteOverEachOther) {
  const Shape shape{2, 1, 2, DType::f32, kPage};
  SequenceCache own(layer_kinds(kWindows, shape), {}, kWindows);
  SequenceCache cache(layer_kinds(kWindows, shape, LayerRows::shared), {}, kWindows);
  cache.begin_step(kStep);
  own.begin_step(kStep);
  for (std::int64_t layer = 0; layer < 5; ++layer) {
    const auto [kept, index] = cache.layer(layer);
    EXPECT_EQ(kept, &cache.kind(kWindows[layer] == 6 ? 1 : kWindows[layer] == 9 ? 2 : 0));
    const std::vector<float> rows(static_cast<std::size_t>(2 * kStep), static_cast<float>(layer));
    kept->append(index, rows.data(), rows.data());
    EXPECT_EQ(static_cast<const float*>(kept->keys(index).data)[kept->pages()[0] * kPage * 2],
              static_cast<float>(layer));
  }
  EXPECT_EQ(5 * cache.kv_bytes_max(), 3 * own.kv_bytes_max());
  std::vector<LayerKind> kinds = layer_kinds(kWindows, shape);
  kinds[0].rows = LayerRows::shared;  // of two layers
  EXPECT_THROW(SequenceCache(kinds, {}, kWindows), Error);
}

TEST(SequenceCache, SequencesShareThePoolOfEachKind) {
  const std::vector<LayerKind> kinds = layer_kinds(kWindows, {2, 1, 2, DType::f32, kPage});
  ASSERT_EQ(kinds.size(), 3u);
  SequenceCache a(kinds, {}, kWindows), b(kinds, {}, kWindows);
  for (const std::int64_t layer : {0, 1, 4})
    EXPECT_EQ(&a.layer(layer).cache->pool(), &b.layer(layer).cache->pool());
  EXPECT_NE(&a.layer(0).cache->pool(), &a.layer(4).cache->pool());
  EXPECT_EQ(&a.kind(1), a.layer(0).cache);
}

TEST(SequenceCache, ACopyHoldsEveryKind) {
  SequenceCache cache = make({2, 20, true});
  for (int i = 0; i < 30; ++i) {
    cache.begin_step(kStep);
    write_step(cache, kStep);
    cache.end_step();
  }
  const auto look = [&] {
    std::vector<float> seen;
    for (std::int64_t layer = 0; layer < 5; ++layer) {
      const auto [kept, index] = cache.layer(layer);
      const auto* k = static_cast<const float*>(kept->keys(index).data);
      for (std::int64_t j = 0; j < 90; ++j) {
        const std::int32_t page = kept->pages()[j / kPage];
        if (page >= 0) seen.push_back(k[(page * kPage + j % kPage) * 2]);
      }
    }
    return seen;
  };
  const std::vector<float> before = look();
  EXPECT_GT(before.size(), 60u);
  cache.poison_freed_pages(true);
  cache.copy_out();
  EXPECT_EQ(cache.copied_pages(), cache.kind(0).copied_pages());
  EXPECT_THROW(cache.begin_step(1), Error);
  for (std::size_t kind = 0; kind < cache.kinds(); ++kind) EXPECT_EQ(cache.kind(kind).allocated_pages(), 0);
  cache.copy_in();
  EXPECT_EQ(look(), before);
  EXPECT_EQ(cache.copied_pages(), 0);
}

TEST(SequenceCache, AStepEndsForAllOrForNone) {
  SequenceCache a = make({}), b = make({});
  const auto position = [](const SequenceCache& cache, std::int64_t layer) {
    return cache.layer(layer).cache->logical_position();
  };
  {
    Step step;
    step.begin(a, 3);
    step.begin(b, 2);
    EXPECT_THROW(step.begin(a, 1), Error) << "given twice";
    write_step(a, 3);
    step.end();
  }
  {
    Step step;
    step.begin(a, 30);
    EXPECT_THROW(step.begin(b, 0), Error);
  }
  for (const std::int64_t layer : {0, 1, 2, 3, 4}) {
    EXPECT_EQ(position(a, layer), 3);
    EXPECT_EQ(position(b, layer), 2);
    EXPECT_EQ(a.layer(layer).cache->allocated_pages(), 1);
    EXPECT_EQ(a.layer(layer).cache->step_tokens(), 0);
    EXPECT_EQ(b.layer(layer).cache->step_tokens(), 0);
  }
}

// The full layers get their page, the local ones behind them do not: nobody may be left inside the step.
TEST(SequenceCache, AStepThatTheSystemRefusesLeavesNoLayerBehind) {
  constexpr std::int64_t kLargePage = std::int64_t{1} << 20;
  const std::int64_t windows[] = {0, 6, 6, 6, 6, 6, 6, 6};
  SequenceCache cache(layer_kinds(windows, {1, 1, 1 << 18, DType::f32, kLargePage}), {}, windows);
  // A page of a layer has 2^40 bytes of keys; 16 pages are mapped for each layer, and a process has 2^47 bytes in all.
  EXPECT_THROW(cache.begin_step(1), Error);
  for (const std::int64_t layer : {0, 1, 7}) {
    EXPECT_EQ(cache.layer(layer).cache->step_tokens(), 0);
    EXPECT_EQ(cache.layer(layer).cache->allocated_pages(), 0);
  }
}

TEST(SequenceCache, NeedsPagesForEveryLayer) {
  for (const std::int64_t layers : {1, 3, 5}) {
    std::vector<LayerKind> kinds = layer_kinds(kWindows, {2, 1, 2, DType::f32, kPage});
    kinds[0].pool = std::make_shared<PagePool>(Shape{layers, 1, 2, DType::f32, kPage});
    EXPECT_THROW(SequenceCache(kinds, {}, kWindows), Error) << layers;
  }
  const std::int64_t other[] = {0, 0, 7};
  EXPECT_THROW(SequenceCache(layer_kinds(kWindows, {2, 1, 2, DType::f32, kPage}), {}, other), Error);
  EXPECT_THROW(make({4, 0, true}), Error) << "sinks without a window";
}

}  // namespace
}  // namespace basin::kv
