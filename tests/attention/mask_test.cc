// The visibility rule of the fast paths against the reference's own, for every small case.
#include "basin/attention/mask.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "attention/reference/rows.h"

namespace basin::attention {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

static_assert(visible({.causal = true, .window = 2, .sink_tokens = 1}, 5, 0));
static_assert(!visible({.causal = true, .window = 2, .sink_tokens = 1}, 5, 3));
static_assert(visible_keys({.causal = true, .window = 2, .sink_tokens = 1}, 5, 9).size() == 3);

template <typename Body>
void for_each_mask(const Body& body) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t window :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{5}, kHuge}) {
      for (const std::int64_t right :
           {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, kHuge}) {
        for (const std::int64_t sinks :
             {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{4}, kHuge})
          body(Mask{causal, window, right, sinks});
      }
    }
  }
}

TEST(Mask, VisibleEqualsTheReference) {
  for_each_mask([](const Mask& mask) {
    for (std::int64_t p = -4; p < 9; ++p) {
      for (std::int64_t j = 0; j < 10; ++j)
        ASSERT_EQ(visible(mask, p, j), reference::sees(mask, p, j)) << p << ' ' << j;
    }
  });
}

TEST(Mask, RangesHoldExactlyTheVisibleKeysAscendingAndDisjoint) {
  for_each_mask([](const Mask& mask) {
    for (std::int64_t kv_tokens = 0; kv_tokens < 9; ++kv_tokens) {
      for (std::int64_t p = -4; p < kv_tokens; ++p) {
        std::vector<std::int64_t> want, got;
        for (std::int64_t j = 0; j < kv_tokens; ++j) {
          if (reference::sees(mask, p, j)) want.push_back(j);
        }
        const VisibleKeys keys = visible_keys(mask, p, kv_tokens);
        for (std::int64_t j = keys.sinks.begin; j < keys.sinks.end; ++j) got.push_back(j);
        for (std::int64_t j = keys.recent.begin; j < keys.recent.end; ++j) got.push_back(j);
        ASSERT_EQ(got, want) << "p " << p << " of " << kv_tokens << " window " << mask.window << " right "
                             << mask.window_right << " sinks " << mask.sink_tokens << " causal "
                             << mask.causal;
        ASSERT_EQ(keys.size(), static_cast<std::int64_t>(want.size()));
      }
    }
  });
}

// gpt-oss: a window of 128 counts the query itself.
TEST(Mask, AWindowOf128ShowsExactly128Keys) {
  const Mask mask{.causal = true, .window = 128};
  EXPECT_EQ(visible_keys(mask, 4000, 8192).size(), 128);
  EXPECT_EQ(visible_keys(mask, 127, 8192).size(), 128);
  EXPECT_EQ(visible_keys(mask, 126, 8192).size(), 127);
}

TEST(Mask, BottomRightAlignment) {
  EXPECT_EQ(query_position({.q_tokens = 3, .kv_tokens = 10}, 0), 7);
  EXPECT_EQ(query_position({.q_tokens = 3, .kv_tokens = 10}, 2), 9);
  EXPECT_EQ(query_position({.q_tokens = 5, .kv_tokens = 2}, 0), -3);
}

}  // namespace
}  // namespace basin::attention
