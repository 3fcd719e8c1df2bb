// Stop strings and characters across the borders of tokens, against a search in the whole text.
#include "engine/text_output.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace basin::test {
namespace {

using engine::TextOutput;

const std::vector<std::string> kPieces = {
    "a", "b", "ab", "aa", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xc3", "\xff"};

std::string random_text(int most) {
  std::string text;
  for (const int piece :
       *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, static_cast<int>(kPieces.size()))))
    if (--most >= 0) text += kPieces[static_cast<std::size_t>(piece)];
  return text;
}

RC_GTEST_PROP(TextOutput, CutsTheTextWhereAWholeSearchFindsTheFirstStop, ()) {
  const std::string bytes = random_text(40);
  text::Utf8Stream utf8;
  const std::string begin = utf8.push(bytes);
  const std::string whole = begin + utf8.finish();
  std::vector<std::string> stops;
  for (int count = *rc::gen::inRange(0, 4); count > 0; --count) {
    text::Utf8Stream clean;
    const std::string stop = random_text(4);
    std::string valid = clean.push(stop);
    valid += clean.finish();
    if (!valid.empty()) stops.push_back(valid);
  }
  const bool include = *rc::gen::arbitrary<bool>();
  TextOutput output(stops, include);
  std::string shown;
  for (std::size_t at = 0; at < bytes.size() && output.stop() == nullptr;) {
    const auto size = static_cast<std::size_t>(*rc::gen::inRange(1, 6));
    const std::string piece = output.push(bytes.substr(at, size));
    RC_ASSERT(!text::first_invalid_utf8(piece));
    shown += piece;
    at += size;
  }
  if (output.stop() == nullptr) shown += output.finish();

  std::size_t first = std::string::npos;
  for (const std::string& stop : stops) first = std::min(first, whole.find(stop));
  if (first == std::string::npos) {
    RC_ASSERT(output.stop() == nullptr);
    RC_ASSERT(shown == whole);
    return;
  }
  // The first stop to be complete ends the text; one that began before it may have been longer.
  RC_ASSERT(output.stop() != nullptr);
  std::size_t end = std::string::npos;
  for (const std::string& stop : stops) {
    const std::size_t at = whole.find(stop);
    if (at != std::string::npos) end = std::min(end, at + stop.size());
  }
  const std::size_t at = include ? shown.size() - output.stop()->size() : shown.size();
  RC_ASSERT(whole.compare(0, shown.size(), shown) == 0);
  RC_ASSERT(whole.compare(at, output.stop()->size(), *output.stop()) == 0);
  RC_ASSERT(at >= first && at <= end);
}

TEST(TextOutput, HoldsBackWhatMayBeginAStop) {
  TextOutput output({"END"}, false);
  EXPECT_EQ(output.push("one E"), "one ");
  EXPECT_EQ(output.push("N"), "");
  EXPECT_EQ(output.push("T"), "ENT");
  EXPECT_EQ(output.push("EN"), "");
  EXPECT_EQ(output.push("D and more"), "");
  ASSERT_NE(output.stop(), nullptr);
  EXPECT_EQ(output.finish(), "");
  TextOutput other({"END"}, false);
  EXPECT_EQ(other.push("EN"), "");
  EXPECT_EQ(other.finish(), "EN");
}

}  // namespace
}  // namespace basin::test
