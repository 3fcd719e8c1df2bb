// Pages and the prefix cache against plain bookkeeping: owners, order of reuse, and what a chain may share.
#include "kv/pages.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <deque>
#include <map>

#include "basin/base/error.h"
#include "kv/prefix_cache.h"

namespace basin::kv {
namespace {

// A random walk over take, retain, release, keep and forget, beside a map that says how it should stand.
RC_GTEST_PROP(Pages, AgreeWithAMapOfOwners, ()) {
  constexpr std::int64_t kLimit = 12;
  Pages pages(kLimit);
  std::map<std::int32_t, std::int64_t> owners;
  std::map<std::int32_t, bool> kept;
  std::deque<std::int32_t> idle;
  std::int32_t reclaimed = -1;
  pages.on_reclaim([&](std::int32_t page) { reclaimed = page; });
  const int steps = *rc::gen::inRange(1, 300);
  for (int step = 0; step < steps; ++step) {
    const auto page = static_cast<std::int32_t>(*rc::gen::inRange<std::int64_t>(0, kLimit));
    const bool known = owners.contains(page);
    switch (*rc::gen::inRange(0, 5)) {
      case 0: {
        std::int64_t held = 0;
        for (const auto& [number, count] : owners) held += count > 0;
        if (held == kLimit) {
          RC_ASSERT_THROWS_AS(pages.take(), Error);
          break;
        }
        reclaimed = -1;
        const std::int32_t taken = pages.take();
        RC_ASSERT(!owners.contains(taken) || owners[taken] == 0);
        if (reclaimed >= 0) {
          RC_ASSERT(reclaimed == taken && taken == idle.front());
          const auto idle_pages = static_cast<std::int64_t>(idle.size());
          const auto used = static_cast<std::int64_t>(owners.size());
          RC_ASSERT(held + idle_pages == used);  // nothing was free
          RC_ASSERT(used == kLimit || idle_pages >= kLimit / 4);
          idle.pop_front();
        }
        owners[taken] = 1;
        kept[taken] = false;
        break;
      }
      case 1:
        if (!known || (owners[page] == 0 && !kept[page])) break;
        pages.retain(page);
        if (owners[page]++ == 0) std::erase(idle, page);
        break;
      case 2:
        if (!known || owners[page] == 0) break;
        RC_ASSERT(pages.release(page) == (owners[page] == 1 && !kept[page]));
        if (--owners[page] == 0 && kept[page]) idle.push_back(page);
        break;
      case 3:
        if (!known || owners[page] == 0) break;
        pages.keep(page);
        kept[page] = true;
        break;
      default:
        if (!known) break;
        pages.forget(page);
        kept[page] = false;
        std::erase(idle, page);
    }
    std::int64_t held = 0, shared = 0;
    for (const auto& [number, count] : owners) {
      RC_ASSERT(pages.owners(number) == count);
      held += count > 0;
      shared += count > 1;
    }
    RC_ASSERT(pages.held() == held && pages.shared() == shared);
    RC_ASSERT(pages.available() == kLimit - held);
    RC_ASSERT(pages.idle() == static_cast<std::int64_t>(idle.size()));
    pages.check_invariants();
  }
}

TEST(Pages, RefuseWhatNobodyHolds) {
  Pages pages(2);
  const std::int32_t page = pages.take();
  EXPECT_FALSE(pages.release(page) == false);
  EXPECT_THROW(pages.release(page), Error);
  EXPECT_THROW(pages.retain(page), Error);
  EXPECT_THROW(pages.keep(page), Error);
  EXPECT_THROW(pages.retain(5), Error);
}

constexpr std::int64_t kPageTokens = 4;

class Prefix : public testing::Test {
 protected:
  explicit Prefix(std::int64_t pages = 64)
      : pool(std::make_shared<PagePool>(Shape{1, 1, 1, DType::f32, kPageTokens}, pages)) {}

  std::shared_ptr<PagePool> pool;
  const LayerKind kind{0, pool};
  PrefixCache prefix{std::span(&kind, 1)};

  static std::vector<std::int32_t> text(std::int64_t count) {
    std::vector<std::int32_t> tokens;
    for (std::int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<std::int32_t>(i * 7 + 1));
    return tokens;
  }

  // Computes `tokens` one by one in a cache that ends with this call, as a sequence would.
  void run(const std::vector<std::int32_t>& tokens, const Policy& policy) {
    Cache cache(pool, policy);
    PrefixCache::Node node = adopt(cache, tokens);
    const auto count = static_cast<std::int64_t>(tokens.size());
    for (std::int64_t p = cache.logical_position(); p < count; ++p) {
      cache.begin_step(1);
      const auto value = static_cast<float>(tokens[static_cast<std::size_t>(p)]);
      cache.append(0, &value, &value);
      const std::int64_t page = p / kPageTokens, begin = page * kPageTokens;
      const auto written =
          std::span(tokens).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(p + 1 - begin));
      const auto pages = std::span(cache.pages() + page, 1);
      if (written.size() == kPageTokens) {
        node = prefix.advance(node, written, policy, pages);
      } else if (p + 1 == count) {
        prefix.remember_part(node, written, policy, pages);
      }
      cache.end_step();
    }
    for (std::int64_t p = 0; p < count; ++p) {
      const std::int32_t page = cache.pages()[p / kPageTokens];
      if (page < 0) continue;
      const std::int64_t row = page * kPageTokens + p % kPageTokens;
      EXPECT_EQ(static_cast<const float*>(cache.keys(0).data)[row],
                static_cast<float>(tokens[static_cast<std::size_t>(p)]));
    }
    prefix.leave(node);
  }

  // Takes what is there, and the chain up to there.
  PrefixCache::Node adopt(Cache& cache, const std::vector<std::int32_t>& tokens) {
    const PrefixCache::Match match = prefix.find(tokens, cache.policy());
    if (match.tokens > 0) cache.adopt(match.pages.front(), match.tokens);
    cache.copy_in();
    prefix.enter(match.node);
    return match.node;
  }

  std::int64_t found(const std::vector<std::int32_t>& tokens, const Policy& policy) const {
    return prefix.find(tokens, policy).tokens;
  }
};

class LargePrefix : public Prefix {
 protected:
  LargePrefix() : Prefix(4096) {}
};

TEST_F(Prefix, FindsAllButTheLastToken) {
  run(text(16), {});
  EXPECT_EQ(found(text(1), {}), 0);
  for (std::int64_t count = 2; count <= 17; ++count) EXPECT_EQ(found(text(count), {}), count - 1);
  EXPECT_EQ(found(text(40), {}), 16);
  auto other = text(17);
  other[5] = 0;
  EXPECT_EQ(found(other, {}), 5);
  other = text(17);
  other[0] = 0;
  EXPECT_EQ(found(other, {}), 0);
  prefix.check_invariants();
}

TEST_F(Prefix, FindsTheBeginningOfAPageThatIsNotFull) {
  for (const std::int64_t count : {3, 6, 16}) {
    run(text(count), {});
    EXPECT_EQ(found(text(count), {}), count - 1);
    EXPECT_EQ(found(text(count + 1), {}), count);
    EXPECT_EQ(found(text(40), {}), count);
    prefix.check_invariants();
  }
}

// A page that was known by its beginning is known as a whole once it is full, and not twice.
TEST_F(Prefix, APageThatFillsUpIsKnownOnce) {
  Cache cache(pool, {});
  PrefixCache::Node node = adopt(cache, text(4));
  cache.begin_step(3);
  cache.end_step();
  const auto tokens = text(4);
  const auto pages = cache.page_table();
  prefix.remember_part(node, std::span(tokens).first(3), {}, pages);
  EXPECT_EQ(prefix.known_pages(), 1);
  EXPECT_EQ(prefix.nodes(), 2);
  prefix.remember_part(node, std::span(tokens).first(2), {}, pages);  // is known already
  EXPECT_EQ(prefix.nodes(), 2);
  cache.begin_step(1);
  cache.end_step();
  node = prefix.advance(node, tokens, {}, pages);
  EXPECT_EQ(prefix.known_pages(), 1);
  EXPECT_EQ(prefix.nodes(), 2);
  EXPECT_EQ(found(text(5), {}), 4);
  prefix.check_invariants();
  prefix.leave(node);
}

// What is found of a page in part is copied: whoever wrote it, and whoever else has found it, goes on as before.
TEST_F(Prefix, APartOfAPageIsCopied) {
  pool->poison_freed_pages(true);
  run(text(16), {});
  std::vector<std::unique_ptr<Cache>> caches;
  std::vector<PrefixCache::Node> nodes;
  for (const float own : {-1.0f, -2.0f}) {
    caches.push_back(std::make_unique<Cache>(pool, Policy{}));
    nodes.push_back(adopt(*caches.back(), text(16)));
    ASSERT_EQ(caches.back()->logical_position(), 15);
    caches.back()->begin_step(1);
    caches.back()->append(0, &own, &own);
    caches.back()->end_step();
  }
  EXPECT_EQ(pool->pages().held(), 3 + 2);
  EXPECT_EQ(pool->pages().shared(), 3);
  const auto last = [&](std::int32_t page) {
    return std::span(static_cast<const float*>(pool->keys(0).data) + page * kPageTokens, kPageTokens);
  };
  for (std::size_t i = 0; i < 2; ++i) {
    const auto row = last(caches[i]->pages()[3]);
    for (std::size_t t = 0; t < 3; ++t) EXPECT_EQ(row[t], static_cast<float>(text(16)[12 + t]));
    EXPECT_EQ(row[3], i == 0 ? -1.0f : -2.0f);
    prefix.leave(nodes[i]);
  }
  const PrefixCache::Match match = prefix.find(text(17), {});
  EXPECT_EQ(last(match.pages.front()[3])[3], static_cast<float>(text(16)[15]));
  EXPECT_THROW(Cache(pool, {}).adopt(match.pages.front(), 17), Error) << "of a page that is not given";
}

TEST_F(Prefix, WhatIsFoundInPartHasBeenUsed) {
  auto other = text(16);
  other[0] = 0;
  run(text(16), {});
  run(other, {});
  {
    Cache cache(pool, {});
    prefix.leave(adopt(cache, text(16)));
  }
  std::vector<std::int32_t> taken;
  while (found(other, {}) == 15) taken.push_back(pool->take());
  EXPECT_EQ(found(other, {}), 12);
  EXPECT_EQ(found(text(16), {}), 15);
  for (const std::int32_t page : taken) pool->release(page);
}

// Texts that begin alike, under a few masks, beside a search through all that were there before.
RC_GTEST_FIXTURE_PROP(LargePrefix, FindsTheLongestBeginning, ()) {
  const Policy policies[] = {{}, {}, {2, 8, true}, {2, 8, false}, {1, 12, true}};
  std::vector<std::pair<std::vector<std::int32_t>, Policy>> earlier;
  for (int round = *rc::gen::inRange(1, 20); round > 0; --round) {
    std::vector<std::int32_t> tokens;
    for (int count = *rc::gen::inRange(1, 24); count > 0; --count) tokens.push_back(*rc::gen::inRange(0, 2));
    const Policy policy = policies[*rc::gen::inRange(0, 5)];
    const auto sees_all = [](const Policy& mask) {  // whole pages, in tokens
      return mask.window == 0 ? 1000 : (mask.sink_tokens + mask.window) / kPageTokens * kPageTokens;
    };
    std::int64_t longest = 0;
    for (const auto& [text, mask] : earlier) {
      const bool same = mask.sink_tokens == policy.sink_tokens && mask.window == policy.window &&
                        mask.in_cache_positions == policy.in_cache_positions;
      const std::int64_t common = std::ranges::mismatch(text, tokens).in1 - text.begin();
      longest = std::max(longest, same ? common : std::min({common, sees_all(mask), sees_all(policy)}));
    }
    RC_ASSERT(found(tokens, policy) == std::min(longest, static_cast<std::int64_t>(tokens.size()) - 1));
    run(tokens, policy);
    prefix.check_invariants();
    RC_ASSERT(pool->pages().held() == 0);
    earlier.emplace_back(std::move(tokens), policy);
  }
}

TEST_F(Prefix, MasksShareOnlyWhatAllOfThemSee) {
  run(text(24), {});
  // 2 sinks and a window of 8 see everything up to token 9: two pages of 4 end there.
  EXPECT_EQ(found(text(25), {2, 8, true}), 8);
  EXPECT_EQ(found(text(8), {2, 8, true}), 7);
  EXPECT_EQ(found(text(10), {2, 8, true}), 8);
  run(text(24), {2, 8, true});
  EXPECT_EQ(found(text(24), {2, 8, true}), 23);
  EXPECT_EQ(found(text(24), {2, 8, false}), 8);
  EXPECT_EQ(found(text(25), {2, 8, true}), 24);
  EXPECT_EQ(found(text(25), {2, 8, false}), 8);
  EXPECT_EQ(found(text(25), {3, 8, true}), 8);
  EXPECT_EQ(found(text(25), {2, 9, true}), 8);
  EXPECT_EQ(found(text(25), {}), 24);
  prefix.check_invariants();
}

TEST_F(Prefix, AWindowNeedsItsSinksAndItsEndOnly) {
  const Policy policy{2, 8, true};
  run(text(32), policy);
  const PrefixCache::Match match = prefix.find(text(33), policy);
  ASSERT_EQ(match.tokens, 32);
  // The next token, 32, sees 25 and later: page 6 holds 24 to 27.
  EXPECT_GE(match.pages[0][0], 0);
  for (std::size_t page = 1; page < 6; ++page) EXPECT_EQ(match.pages[0][page], -1);
  EXPECT_GE(match.pages[0][6], 0);
  EXPECT_GE(match.pages[0][7], 0);
  EXPECT_EQ(match.idle_pages, 3);
}

TEST_F(Prefix, PagesGoWhenTheyAreNeededElsewhere) {
  run(text(64), {});
  EXPECT_EQ(pool->pages().idle(), 16);
  std::vector<std::int32_t> taken;
  while (pool->pages().available() > 2) {
    taken.push_back(pool->take());
    prefix.check_invariants();
    pool->pages().check_invariants();
  }
  // The ends of a text go before its beginning.
  EXPECT_EQ(prefix.known_pages(), 2);
  EXPECT_EQ(found(text(65), {}), 8);
  for (const std::int32_t page : taken) pool->release(page);
}

TEST_F(Prefix, AnEndlessStreamIsNotRememberedWithoutEnd) {
  const Policy policy{4, 8, true};
  Cache cache(pool, policy);
  PrefixCache::Node node = PrefixCache::kRoot;
  prefix.enter(node);
  const std::int64_t page_tokens = pool->shape().page_tokens, limit = pool->pages().limit();
  for (std::int64_t page = 0; page < 20 * limit; ++page) {
    cache.begin_step(page_tokens);
    cache.end_step();
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(page_tokens), static_cast<std::int32_t>(page));
    node =
        prefix.advance(node, tokens, policy, cache.page_table().subspan(static_cast<std::size_t>(page), 1));
    ASSERT_LE(prefix.nodes(), 4 * limit);
    prefix.check_invariants();
  }
  EXPECT_EQ(node, PrefixCache::kNowhere);
  prefix.enter(node);  // as of nobody
  prefix.leave(node);
  prefix.leave(node);
  prefix.check_invariants();
}

TEST_F(Prefix, ClearingForgetsAllAndHarmsNobody) {
  run(text(16), {});
  Cache cache(pool, {});
  const PrefixCache::Node node = adopt(cache, text(17));
  prefix.clear();
  prefix.check_invariants();
  EXPECT_EQ(found(text(17), {}), 0);
  EXPECT_EQ(pool->pages().held(), 4);
  EXPECT_EQ(static_cast<const float*>(cache.keys(0).data)[cache.pages()[3] * kPageTokens + 3], 15.0f * 7 + 1);
  prefix.leave(node);
  prefix.check_invariants();
}

}  // namespace
}  // namespace basin::kv
