// Pages and the prefix cache against plain bookkeeping: owners, order of reuse, and what a chain may share.
#include "kv/pages.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

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
  std::shared_ptr<PagePool> pool = std::make_shared<PagePool>(Shape{1, 1, 1, DType::f32, kPageTokens}, 64);
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
    const PrefixCache::Match match = prefix.find(tokens, policy);
    if (match.tokens > 0) cache.adopt(match.pages.front());
    PrefixCache::Node node = match.node;
    prefix.enter(node);
    for (std::int64_t p = match.tokens; p < static_cast<std::int64_t>(tokens.size()); ++p) {
      cache.begin_step(1);
      const auto value = static_cast<float>(tokens[static_cast<std::size_t>(p)]);
      cache.append(0, &value, &value);
      if ((p + 1) % kPageTokens == 0) {
        const std::int64_t page = p / kPageTokens;
        node = prefix.advance(
            node, std::span(tokens).subspan(static_cast<std::size_t>(page * kPageTokens), kPageTokens),
            policy, std::span(cache.pages() + page, 1));
      }
      cache.end_step();
    }
    prefix.leave(node);
  }

  std::int64_t found(const std::vector<std::int32_t>& tokens, const Policy& policy) const {
    return prefix.find(tokens, policy).tokens;
  }
};

TEST_F(Prefix, FindsWholePagesAndLeavesATokenToCompute) {
  run(text(16), {});
  EXPECT_EQ(found(text(16), {}), 12);
  EXPECT_EQ(found(text(17), {}), 16);
  EXPECT_EQ(found(text(40), {}), 16);
  auto other = text(17);
  other[5] = 0;
  EXPECT_EQ(found(other, {}), 4);
  prefix.check_invariants();
}

TEST_F(Prefix, MasksShareOnlyWhatAllOfThemSee) {
  run(text(24), {});
  // 2 sinks and a window of 8 see everything up to token 9: two pages of 4 end there.
  EXPECT_EQ(found(text(25), {2, 8, true}), 8);
  run(text(24), {2, 8, true});
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
  const PrefixCache::Match match = prefix.find(text(17), {});
  cache.adopt(match.pages.front());
  prefix.enter(match.node);
  prefix.clear();
  prefix.check_invariants();
  EXPECT_EQ(found(text(17), {}), 0);
  EXPECT_EQ(pool->pages().held(), 4);
  EXPECT_EQ(static_cast<const float*>(cache.keys(0).data)[cache.pages()[3] * kPageTokens + 3], 15.0f * 7 + 1);
  prefix.leave(match.node);
  prefix.check_invariants();
}

}  // namespace
}  // namespace basin::kv
