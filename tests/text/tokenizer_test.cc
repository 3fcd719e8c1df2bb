#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "basin/base/error.h"
#include "text/chat.h"

namespace basin::text {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using Ids = std::vector<std::int32_t>;

// A Qwen-like tokenizer of 288 tokens, trained with the tokenizers package 0.23.3, which also gave the ids below.
const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::from_directory(BASIN_SOURCE_DIR "/tests/text/tiny");
  return tokenizer;
}

TEST(TokenizerGolden, Encode) {
  EXPECT_THAT(tiny().encode("the cat sat", true), ElementsAre(261, 267, 283));
  EXPECT_THAT(tiny().encode("Hello world", true), ElementsAre(42, 71, 268, 286));
  EXPECT_THAT(tiny().encode("the that12\r\n  x", true),
              ElementsAre(261, 284, 19, 20, 204, 201, 223, 223, 90));
  EXPECT_THAT(tiny().encode("cafe\u0301 caf\u00e9", true),  // NFC makes both the same
              ElementsAre(69, 67, 72, 130, 105, 223, 69, 67, 72, 130, 105));
  EXPECT_THAT(tiny().encode("a  <tool>\u00a0b", true), ElementsAre(67, 287, 129, 257, 68));  // lstrip
  EXPECT_THAT(tiny().encode("\u180e\U0001f937\U0001f3ff\u200d\u2640\ufe0f", true),
              ElementsAre(160, 257, 239, 175, 256, 100, 118, 175, 256, 240, 126, 161, 225, 238, 161, 250, 225,
                          174, 119, 240));
  EXPECT_TRUE(tiny().encode("", true).empty());
}

TEST(TokenizerGolden, SpecialTokensOnlyWhenAsked) {
  const std::string text = "<|im_start|>hi<|im_end|>";
  EXPECT_THAT(tiny().encode(text, true), ElementsAre(1, 74, 75, 2));
  EXPECT_THAT(tiny().encode(text, false), ElementsAre(30, 94, 75, 79, 65, 85, 86, 67, 84, 86, 94, 32, 74, 75,
                                                      30, 94, 75, 79, 65, 71, 80, 70, 94, 32));
}

TEST(TokenizerGolden, ChatmlNeverParsesContent) {
  const auto chatml = [](const Tokenizer& tokenizer, const std::vector<Message>& messages,
                         const std::string& system) {
    const std::string chat_template = "<|im_start|>system\n" + system + "<|im_end|>";
    return find_chat_format(tokenizer, chat_template, "llama")->render(messages, {});
  };
  const std::vector<Message> messages = {{"user", "hello<|im_end|>"}};
  const Ids expected = {1,  85,  91,  85,  86,  71, 79, 201, 261, 267, 2,  201, 1,  87, 85,
                        71, 84,  201, 260, 268, 30, 94, 75,  79,  65,  71, 80,  70, 94, 32,
                        2,  201, 1,   67,  85,  85, 75, 85,  86,  67,  80, 86,  201};
  EXPECT_THAT(chatml(tiny(), messages, "the cat"), ElementsAreArray(expected));
  const std::vector<Message> with_system = {{"system", "the cat"}, messages[0]};
  EXPECT_THAT(chatml(tiny(), with_system, "not this"), ElementsAreArray(expected));
  EXPECT_EQ(tiny().decode(chatml(tiny(), messages, ""), true),
            "<|im_start|>user\nhello<|im_end|><|im_end|>\n<|im_start|>assistant\n");
}

TEST(Tokenizer, Facts) {
  EXPECT_EQ(tiny().vocabulary(), 288);
  EXPECT_EQ(tiny().bos(), std::nullopt);
  EXPECT_FALSE(tiny().adds_bos());
  EXPECT_THAT(tiny().stops(), ElementsAre(0, 2));  // <|endoftext|>, <|im_end|>
  EXPECT_EQ(tiny().id_of("<tool>"), 287);
  EXPECT_EQ(tiny().id_of("no such token"), std::nullopt);
}

TEST(Tokenizer, Decode) {
  const std::string text = "the cat\u0301 \U0001f937 <tool>\r\n";
  EXPECT_EQ(tiny().decode(tiny().encode("x" + text, true), true), "xthe cat\u0301 \U0001f937<tool>\r\n");
  EXPECT_EQ(tiny().decode(Ids{1, 74, 75, 2}, true), "<|im_start|>hi<|im_end|>");
  EXPECT_EQ(tiny().decode(Ids{1, 74, 75, 2}, false), "hi");
  EXPECT_EQ(tiny().decode(Ids{175, 256, 74}, true), "\xef\xbf\xbdh");  // a character that is cut
  for (const std::int32_t id : {-1, 288, 1 << 30}) {
    try {
      tiny().token_bytes(id, true);
      ADD_FAILURE() << id;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    }
  }
}

TEST(Tokenizer, EveryTextSurvives) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int i = 0; i < 60; ++i) text.push_back(static_cast<char>(random() % 128));
    const Ids ids = tiny().encode(text, false);
    EXPECT_EQ(tiny().decode(ids, true), text);
  }
}

TEST(Tokenizer, InvalidUtf8NamesTheByte) {
  try {
    tiny().encode("caf\xe9!", true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_THAT(error.what(), testing::HasSubstr("byte 3"));
  }
}

TEST(Tokenizer, LongInputsTakeLinearithmicTime) {
  constexpr std::size_t kBytes = 1 << 20;
  std::mt19937 random(3);
  std::string letters;
  while (letters.size() < kBytes) letters.push_back(static_cast<char>('a' + random() % 26));
  std::string combining = "a";
  while (combining.size() < kBytes) combining += "\u0301";
  std::string words;
  while (words.size() < kBytes) words += "the cat, ";
  const std::vector<std::string> texts = {std::string(kBytes, 'a'),
                                          std::string(kBytes, ' '),
                                          std::string(kBytes, '\n'),
                                          std::string(kBytes, '<'),
                                          std::string(kBytes, '1'),
                                          letters,
                                          combining,
                                          words,
                                          std::string(kBytes, ' ') + "x"};
  for (const std::string& text : texts) {
    const auto start = std::chrono::steady_clock::now();
    const Ids ids = tiny().encode(text, true);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_LT(seconds.count(), 5.0) << "starts with " << text.substr(0, 5);  // quadratic would take minutes
    RecordProperty("seconds_" + std::to_string(&text - texts.data()), std::to_string(seconds.count()));
    if (text != combining) {
      EXPECT_EQ(tiny().decode(ids, true), text);
    }
  }
}

}  // namespace
}  // namespace basin::text
