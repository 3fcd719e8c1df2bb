#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace basin::text {
namespace {

using namespace std::string_literals;

struct Case {
  std::string bytes;
  std::optional<std::size_t> invalid;
  std::string shown;  // with U+FFFD per maximal part, as Unicode recommends and Python's "replace" does
};

const std::vector<Case>& cases() {
  const std::string r = "\xef\xbf\xbd";
  static const std::vector<Case> table = {
      {"", std::nullopt, ""},
      {"plain\0text"s, std::nullopt, "plain\0text"s},
      {"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf",
       std::nullopt,
       "\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"},
      {"a\x80", 1, "a" + r},
      {"\xc0\xaf", 0, r + r},                   // overlong
      {"\xc1\xbf", 0, r + r},                   // overlong
      {"\xe0\x9f\xbf", 0, r + r + r},           // overlong
      {"\xf0\x8f\xbf\xbf", 0, r + r + r + r},   // overlong
      {"ab\xed\xa0\x80", 2, "ab" + r + r + r},  // surrogate
      {"\xf4\x90\x80\x80", 0, r + r + r + r},   // beyond U+10FFFF
      {"\xf5\x80", 0, r + r},
      {"\xff", 0, r},
      {"abc\xe2\x82", 3, "abc" + r},      // cut
      {"abc\xf0\x9f\x98", 3, "abc" + r},  // cut
      {"\xe2\x82z", 0, r + "z"},          // cut by another character
      {"\xf0\x9f\x98\xe2\x82\xac", 0, r + "\xe2\x82\xac"},
      {"\xc3\xa9\xc3", 2, "\xc3\xa9" + r},
  };
  return table;
}

TEST(Utf8, FirstInvalidByte) {
  for (const Case& c : cases())
    EXPECT_EQ(first_invalid_utf8(c.bytes), c.invalid) << testing::PrintToString(c.bytes);
}

TEST(Utf8, StreamGivesTheSameTextForEverySplit) {
  std::string all, shown;
  for (const Case& c : cases()) {
    all += c.bytes + "|";  // the separator ends what was cut
    shown += c.shown + "|";
  }
  for (std::size_t step = 1; step <= all.size(); ++step) {
    Utf8Stream stream;
    std::string text;
    for (std::size_t i = 0; i < all.size(); i += step) {
      const std::string part = stream.push(std::string_view(all).substr(i, step));
      EXPECT_EQ(first_invalid_utf8(part), std::nullopt);
      text += part;
    }
    EXPECT_EQ(text + stream.finish(), shown) << "in steps of " << step;
  }
}

TEST(Utf8, StreamHoldsBackOnlyWhatCanStillBecomeACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xf0\x9f"), "a");
  EXPECT_EQ(stream.push("\x98"), "");
  EXPECT_EQ(stream.push("\x80z"), "\xf0\x9f\x98\x80z");
  EXPECT_EQ(stream.push("\xe2\x82"), "");
  EXPECT_EQ(stream.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(stream.finish(), "");
}

}  // namespace
}  // namespace basin::text
