// The page policy against brute force over every token: what must stay, what must go, and the seven lengths.
#include "kv/cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

constexpr std::int64_t kLayers = 2, kHeads = 1, kHead = 2;

Cache make(std::int64_t sinks, std::int64_t window, std::int64_t page, DType dtype = DType::f32) {
  return Cache({kLayers, kHeads, kHead, dtype, page}, {sinks, window, true});
}

bool visible(std::int64_t j, std::int64_t p, std::int64_t sinks, std::int64_t window) {
  return j <= p && (window == 0 || j < sinks || p - j < window);
}

// Runs steps of `step` tokens; token p of layer l is written as k = (p, l), v = (-p, l).
void write_step(Cache& cache, std::int64_t step) {
  const std::int64_t first = cache.logical_position();
  cache.begin_step(step);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    std::vector<float> k, v;
    for (std::int64_t t = 0; t < step; ++t) {
      k.insert(k.end(), {static_cast<float>(first + t), static_cast<float>(layer)});
      v.insert(v.end(), {-static_cast<float>(first + t), static_cast<float>(layer)});
    }
    cache.append(layer, k.data(), v.data());
  }
}

const float* row(const ConstView& view, const Cache& cache, std::int64_t j) {
  const std::int64_t page = cache.shape().page_tokens;
  const std::int64_t physical = cache.pages()[j / page] * page + j % page;
  return static_cast<const float*>(view.data) + physical * kHeads * kHead;
}

struct Numbers {
  std::int64_t sinks, window, step, page;
};

// Everything the query range [first, last] sees must be where the table says, with the values once written.
void expect_readable(const Cache& cache, std::int64_t first, std::int64_t last, const Numbers& n) {
  for (std::int64_t j = 0; j <= last; ++j) {
    if (!visible(j, last, n.sinks, n.window) && !visible(j, std::max(first, j), n.sinks, n.window)) continue;
    ASSERT_GE(cache.pages()[j / n.page], 0) << "token " << j << " at " << last;
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      const float* k = row(cache.keys(layer), cache, j);
      const float* v = row(cache.values(layer), cache, j);
      ASSERT_EQ(k[0], static_cast<float>(j));
      ASSERT_EQ(k[1], static_cast<float>(layer));
      ASSERT_EQ(v[0], -static_cast<float>(j));
    }
  }
}

void run_policy(const Numbers& n) {
  SCOPED_TRACE(testing::Message() << "N " << n.sinks << " M " << n.window << " C " << n.step << " P "
                                  << n.page);
  Cache cache = make(n.sinks, n.window, n.page);
  cache.poison_freed_pages(true);
  const std::int64_t bound = page_bound(cache.policy(), n.page, n.step);
  std::int64_t most_visible = 0, most_pages = 0;
  while (cache.logical_position() < 2 * (n.sinks + n.window) + 150) {
    const std::int64_t first = cache.logical_position();
    write_step(cache, n.step);
    ASSERT_LE(cache.allocated_pages(), bound);
    most_pages = std::max(most_pages, cache.allocated_pages());
    expect_readable(cache, first, first + n.step - 1, n);
    for (std::int64_t p = first; p < first + n.step; ++p) {
      std::int64_t count = 0;
      for (std::int64_t j = 0; j <= p; ++j) count += visible(j, p, n.sinks, n.window);
      ASSERT_EQ(cache.visible_tokens(p), count);
      most_visible = std::max(most_visible, count);
    }
    cache.end_step();
    // A page goes exactly when no query from here on can see any of its tokens.
    const std::int64_t seen = cache.logical_position();
    std::set<std::int32_t> distinct;
    std::int64_t kept = 0;
    for (std::int64_t page = 0; page * n.page < seen; ++page) {
      bool needed = false;
      for (std::int64_t j = page * n.page; j < (page + 1) * n.page; ++j)
        needed = needed || visible(j, std::max(seen, j), n.sinks, n.window);
      ASSERT_EQ(cache.pages()[page] >= 0, needed) << "page " << page << " after " << seen;
      if (!needed) continue;
      ASSERT_TRUE(distinct.insert(cache.pages()[page]).second);
      kept += std::min(seen, (page + 1) * n.page) - page * n.page;
    }
    ASSERT_EQ(cache.allocated_pages(), static_cast<std::int64_t>(distinct.size()));
    ASSERT_LE(cache.allocated_pages(), page_bound(cache.policy(), n.page, 1));
    ASSERT_EQ(cache.kept_tokens(), kept);
    ASSERT_EQ(cache.cache_position(), cache.visible_tokens(seen) - 1);
    ASSERT_EQ(cache.ring_offset(), std::max<std::int64_t>(0, seen - n.window + 1) % n.page);
    // The slot that the next token is promised is the one it gets.
    const std::int64_t slot = cache.write_slot();
    cache.begin_step(1);
    ASSERT_EQ(cache.pages()[seen / n.page] * n.page + seen % n.page, slot);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      const float k[] = {static_cast<float>(seen), static_cast<float>(layer)};
      const float v[] = {-static_cast<float>(seen), static_cast<float>(layer)};
      cache.append(layer, k, v);
    }
    most_pages = std::max(most_pages, cache.allocated_pages());
    most_visible = std::max(most_visible, cache.visible_tokens(seen));
    cache.end_step();
  }
  EXPECT_EQ(cache.kept_tokens_max(), most_visible);
  EXPECT_EQ(cache.kv_bytes_max(), most_pages * 2 * kLayers * n.page * kHeads * kHead * 4);
}

TEST(KvCache, PolicyAgainstBruteForce) {
  for (const std::int64_t sinks : {0, 1, 4, 17}) {
    for (const std::int64_t window : {1, 2, 12, 33}) {
      for (const std::int64_t step : {1, 7, 40}) {
        for (const std::int64_t page : {1, 3, 16, 64}) {
          run_policy({sinks, window, step, page});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(KvCache, WithoutAWindowNothingGoes) {
  Cache cache = make(0, 0, 16);
  for (int i = 0; i < 30; ++i) {
    write_step(cache, 11);
    cache.end_step();
  }
  EXPECT_EQ(cache.kept_tokens(), 330);
  EXPECT_EQ(cache.kept_tokens_max(), 330);
  EXPECT_EQ(cache.allocated_pages(), 21);
  expect_readable(cache, 0, 329, {0, 0, 11, 16});
}

TEST(KvCache, FreedPagesArePoisonedAndRecycled) {
  Cache cache = make(1, 4, 4);
  cache.poison_freed_pages(true);
  for (int i = 0; i < 12; ++i) {
    write_step(cache, 1);
    cache.end_step();
  }
  // Tokens 0-3 are the sink's page, 4-7 went; the next page recycles theirs, and its unwritten rows are NaN.
  ASSERT_EQ(cache.pages()[1], -1);
  write_step(cache, 1);
  const float* k = row(cache.keys(1), cache, 12);
  EXPECT_EQ(k[0], 12.0f);
  EXPECT_TRUE(std::isnan(k[kHead]));
  EXPECT_EQ(cache.keys(0).shape[0], 3) << "three pages were ever needed";
}

TEST(KvCache, Bf16RoundsToNearestEven) {
  Cache cache = make(0, 0, 2, DType::bf16);
  cache.begin_step(1);
  const float k[] = {1.00390625f, -3.0f}, v[] = {1.01171875f, 0.0f};
  for (std::int64_t layer = 0; layer < kLayers; ++layer) cache.append(layer, k, v);
  cache.end_step();
  const auto* keys = static_cast<const bf16*>(cache.keys(1).data);
  const auto* values = static_cast<const bf16*>(cache.values(1).data);
  EXPECT_EQ(to_float(keys[0]), 1.0f);
  EXPECT_EQ(to_float(keys[1]), -3.0f);
  EXPECT_EQ(to_float(values[0]), 1.015625f);
}

// A latent cache keeps one key per token and no value, and an indexer's key beside it.
TEST(KvCache, KeysWithoutValuesAndIndexKeys) {
  Shape shape{2, 1, 6, DType::f32, 4};
  shape.d_value = 0;
  shape.d_index = 3;
  EXPECT_EQ(shape.row_floats(), 9);
  EXPECT_EQ(shape.page_bytes(), 2 * 4 * 9 * 4);
  auto pool = std::make_shared<PagePool>(shape);
  pool->poison_freed_pages(true);
  Cache cache(pool, {});
  cache.begin_step(7);
  for (std::int64_t layer = 0; layer < 2; ++layer) {
    std::vector<float> k(7 * 6), index(7 * 3);
    for (std::size_t i = 0; i < k.size(); ++i)
      k[i] = static_cast<float>(layer * 1000) + static_cast<float>(i);
    for (std::size_t i = 0; i < index.size(); ++i)
      index[i] = -static_cast<float>(layer * 1000) - static_cast<float>(i);
    cache.append(layer, k.data(), nullptr, index.data());
  }
  cache.end_step();
  const auto expect_rows = [&](const std::int32_t* pages) {
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      const ConstView keys = pool->keys(layer), index = pool->index_keys(layer);
      EXPECT_EQ(keys.shape[3], 6);
      EXPECT_EQ(index.shape[3], 3);
      for (std::int64_t t = 0; t < 7; ++t) {
        const std::int64_t row = pages[t / 4] * 4 + t % 4;
        for (std::int64_t d = 0; d < 6; ++d)
          EXPECT_EQ(static_cast<const float*>(keys.data)[row * 6 + d],
                    static_cast<float>(layer * 1000 + t * 6 + d));
        for (std::int64_t d = 0; d < 3; ++d)
          EXPECT_EQ(static_cast<const float*>(index.data)[row * 3 + d],
                    -static_cast<float>(layer * 1000 + t * 3 + d));
      }
    }
  };
  expect_rows(cache.pages());
  // Copied out, wiped and copied in again, with everything that a page holds.
  std::vector<std::byte> kept(2 * static_cast<std::size_t>(shape.page_bytes()));
  for (int n = 0; n < 2; ++n) pool->copy_out(cache.pages()[n], kept.data() + n * shape.page_bytes());
  const std::int32_t other[] = {pool->take(), pool->take()};
  for (int n = 0; n < 2; ++n) pool->copy_in(other[n], kept.data() + n * shape.page_bytes());
  expect_rows(other);
  for (const std::int32_t page : other) pool->release(page);
  EXPECT_TRUE(std::isnan(static_cast<const float*>(pool->index_keys(1).data)[other[0] * 4 * 3]));
  shape.d_value = -2;
  EXPECT_THROW(PagePool bad(shape), Error);
}

TEST(KvCache, AStepThatIsAbandonedLeavesNothingBehind) {
  for (const std::int64_t window : {0, 5}) {
    Cache cache = make(window > 0 ? 2 : 0, window, 4), other = make(window > 0 ? 2 : 0, window, 4);
    for (int i = 0; i < 12; ++i) {
      for (const std::int64_t lost : {1, 3, 40}) {
        const std::int64_t kept = cache.kept_tokens(), pages = cache.allocated_pages(),
                           slot = cache.write_slot();
        write_step(cache, lost);
        cache.abandon_step();
        EXPECT_EQ(cache.step_tokens(), 0);
        EXPECT_EQ(cache.kept_tokens(), kept);
        EXPECT_EQ(cache.allocated_pages(), pages);
        EXPECT_EQ(cache.write_slot(), slot);
        cache.abandon_step();  // outside of a step: nothing
      }
      for (Cache* each : {&cache, &other}) {
        write_step(*each, 3);
        expect_readable(*each, each->logical_position(), each->logical_position() + 2,
                        {window > 0 ? 2 : 0, window, 3, 4});
        each->end_step();
      }
    }
    EXPECT_EQ(cache.logical_position(), 36);
    EXPECT_EQ(cache.kept_tokens(), other.kept_tokens());
    EXPECT_EQ(cache.kept_tokens_max(), other.kept_tokens_max());
  }
}

TEST(KvCache, AStepThatTheSystemRefusesLeavesNothingBehind) {
  constexpr std::int64_t kPage = std::int64_t{1} << 20;
  Cache cache = make(0, 0, kPage);
  write_step(cache, 10);
  cache.end_step();
  const std::int64_t slot = cache.write_slot();
  for (int i = 0; i < 2; ++i) {  // more bytes than there are addresses
    EXPECT_THROW(cache.begin_step(std::int64_t{1} << 45), Error);
    EXPECT_EQ(cache.step_tokens(), 0);
    EXPECT_EQ(cache.allocated_pages(), 1);
    EXPECT_EQ(cache.kept_tokens(), 10);
    EXPECT_EQ(cache.write_slot(), slot);
  }
  write_step(cache, 5);
  expect_readable(cache, 10, 14, {0, 0, 5, kPage});
  cache.end_step();
}

TEST(KvCache, RefusesWhatCannotWork) {
  EXPECT_THROW(make(4, 0, 16), Error) << "sinks without a window";
  EXPECT_THROW(make(-1, 4, 16), Error);
  EXPECT_THROW(make(0, -1, 16), Error);
  EXPECT_THROW(make(0, 0, 0), Error);
  EXPECT_THROW(make(0, 0, 16, DType::i8), Error);
  Cache cache = make(0, 0, 16);
  EXPECT_THROW(cache.begin_step(0), Error);
  cache.begin_step(1);
  EXPECT_THROW(cache.begin_step(1), Error) << "a step inside a step";
}

}  // namespace
}  // namespace basin::kv
