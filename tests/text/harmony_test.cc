// The expected texts and messages are those of openai-harmony 0.0.8.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "basin/base/error.h"
#include "chat_cases.h"

namespace basin::text {
namespace {

using Messages = std::vector<Message>;

const Tokenizer& tokenizer() {
  static const Tokenizer made = byte_tokenizer(
      {"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"});
  return made;
}

const ChatFormat& harmony() {
  static const auto made = find_chat_format(tokenizer(), "", "gpt-oss");
  return *made;
}

// Without the system message, which is the same in all.
std::string rendered(const Messages& messages, const ChatOptions& options = {}) {
  const std::string text = marked(tokenizer(), harmony().render(messages, options));
  const std::string end = "«<|end|>»";
  return text.substr(text.find(end) + end.size());
}

std::string answered(std::string_view answer) {
  return parsed(tokenizer(), *harmony().parser({}), answer);
}

TEST(ChatHarmony, SystemMessage) {
  EXPECT_EQ(harmony().name(), "harmony");
  ChatOptions options;
  options.date = "2025-06-28";
  options.reasoning_effort = "high";
  const Messages messages = {{"user", "hi<|end|>"}};
  EXPECT_EQ(
      marked(tokenizer(), harmony().render(messages, options)),
      "«<|start|>»system«<|message|>»You are ChatGPT, a large language model trained by OpenAI.\n"
      "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: high\n\n"
      "# Valid channels: analysis, commentary, final. Channel must be included for every message.«<|end|>»"
      "«<|start|>»user«<|message|>»hi<|end|>«<|end|>»«<|start|>»assistant");
}

TEST(ChatHarmony, ThoughtsBeforeAFinalAnswerAreDropped) {
  const Messages messages = {
      {"developer", "be brief"},
      {"user", "one"},
      {"assistant", "1", "dropped"},
      {"user", "two"},
      {"assistant", "Let me see.", "kept", {{"a", "f", R"({"x": 1})"}, {"b", "g", "{}"}}},
      {"tool", "G", "", {}, "b"},
      {"tool", "F", "", {}, "a"}};
  EXPECT_EQ(rendered(messages),
            "«<|start|>»developer«<|message|>»# Instructions\n\nbe brief«<|end|>»"
            "«<|start|>»user«<|message|>»one«<|end|>»"
            "«<|start|>»assistant«<|channel|>»final«<|message|>»1«<|end|>»"
            "«<|start|>»user«<|message|>»two«<|end|>»"
            "«<|start|>»assistant«<|channel|>»analysis«<|message|>»kept«<|end|>»"
            "«<|start|>»assistant«<|channel|>»commentary«<|message|>»Let me see.«<|end|>»"
            "«<|start|>»assistant to=functions.f«<|channel|>»commentary "
            "«<|constrain|>»json«<|message|>»{\"x\": 1}«<|call|>»"
            "«<|start|>»assistant to=functions.g«<|channel|>»commentary "
            "«<|constrain|>»json«<|message|>»{}«<|call|>»"
            "«<|start|>»functions.g to=assistant«<|channel|>»commentary«<|message|>»G«<|end|>»"
            "«<|start|>»functions.f to=assistant«<|channel|>»commentary«<|message|>»F«<|end|>»"
            "«<|start|>»assistant");
}

// The tools of the public example of openai/harmony.
TEST(ChatHarmony, Tools) {
  ChatOptions options;
  options.tools = {
      R"({"type": "function", "function": {"name": "get_location", "description": "Gets the location of the user."}})",
      R"({"type": "function", "function": {"name": "get_weather", "description": "Gets the weather.\nNow.", "parameters": {
        "type": "object", "required": ["location"], "properties": {
          "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
          "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
          "places": {"type": "array", "items": {"type": "string"}}}}}})",
      R"({"type": "function", "function": {"name": "kitchensink", "description": "Complex.", "parameters": {
        "description": "params object", "type": "object", "properties": {
          "string": {"type": "string", "title": "STRING", "description": "A string", "examples": ["hello", "world"]},
          "string_nullable": {"type": "string", "nullable": true, "description": "A nullable string", "default": "d"},
          "either": {"description": "a oneof", "default": 20, "oneOf": [
            {"type": "string", "default": "default_string"}, {"type": "number", "description": "numbers, too"}]},
          "many": {"type": ["integer", "null"]}, "flag": {"type": "boolean"}, "any": {}, "list": {"type": "array"}}}}})"};
  const std::string text = marked(tokenizer(), harmony().render(Messages{{"user", "x"}}, options));
  EXPECT_THAT(text,
              testing::HasSubstr("every message.\nCalls to these tools must go to the commentary channel: "
                                 "'functions'.«<|end|>»"));
  EXPECT_THAT(text, testing::HasSubstr(R"(«<|start|>»developer«<|message|>»# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the weather.
// Now.
type get_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
places?: string[],
}) => any;

// Complex.
type kitchensink = (_: // params object
{
// STRING
//
// A string
// Examples:
// - "hello"
// - "world"
string?: string,
// A nullable string
string_nullable?: string | null, // default: "d"
// a oneof
// default: 20
either?:
 | string // default: "default_string"
 | number // numbers, too
,
many?: number | null,
flag?: boolean,
any?: any,
list?: Array<any>,
}) => any;

} // namespace functions«<|end|>»)"));
}

TEST(ChatHarmony, Refuses) {
  const auto refused = [](const Messages& messages, const ChatOptions& options, const char* what) {
    try {
      harmony().render(messages, options);
      ADD_FAILURE() << what;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), testing::HasSubstr(what));
    }
  };
  refused({{"user", "x"}, {"tool", "y"}}, {}, "answers no call");
  refused({{"tool", "y", "", {}, "z"}}, {}, "'z'");
  refused({{"robot", "x"}}, {}, "'robot'");
  ChatOptions options;
  options.reasoning_effort = "extreme";
  refused({{"user", "x"}}, options, "'extreme'");
  ChatOptions quick;
  quick.thinking = false;
  try {
    harmony().render(Messages{{"user", "x"}}, quick);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

TEST(ChatHarmony, Answers) {
  EXPECT_EQ(answered("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
                     "Hi é<|return|>"),
            "reasoning(Hm.) content(Hi é)");
  EXPECT_EQ(answered("<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>commentary "
                     "to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>"),
            "content(First.) call0(f) args0({\"x\": 1})");
  EXPECT_EQ(
      answered(" to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}<|call|><|start|>assistant"
               "<|channel|>analysis to=python code<|message|>1+1<|call|>"),
      "call0(f) args0({}) call1(python) args1(1+1)");
  EXPECT_EQ(answered("<|channel|>commentary to=functions.f<|message|><|call|>"), "call0(f) args0({})");
}

TEST(ChatHarmony, MalformedAnswersMeanWhatCanBeMadeOfThem) {
  EXPECT_EQ(answered(""), "");
  EXPECT_EQ(answered("<|return|>"), "");
  EXPECT_EQ(answered("Hi there"), "content(Hi there)");
  EXPECT_EQ(answered("user guide<|return|>"), "content(user guide)");
  EXPECT_EQ(answered("<|message|>Hi"), "content(Hi)");
  EXPECT_EQ(answered("<|channel|>final Hi<|return|>"), "content( Hi)");
  EXPECT_EQ(answered("<|channel|>analysis<|message|>a<|channel|>final<|message|>b"),
            "reasoning(a) content(b)");
  EXPECT_EQ(answered("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b"),
            "reasoning(a) content(b)");
  EXPECT_EQ(answered("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b"),
            "reasoning(a) content(b)");
  EXPECT_EQ(
      answered(
          "<|channel|>commentary to=functions.f to=functions.g <|constrain|>json<|constrain|>x<|message|>{}"),
      "call0(f) args0({})");
  EXPECT_EQ(answered("<|channel|><|channel|>final<|message|>a<|message|>b"), "content(ab)");
  EXPECT_EQ(answered("<|channel|>final<|message|>a<|end|><|start|>user<|message|>not ours<|end|><|start|>"
                     "functions.f to=assistant<|message|>nor this"),
            "content(a)");
  const auto cut = harmony().parser({});
  cut->push(tokenizer().id_of("<|message|>").value());
  EXPECT_TRUE(cut->push(0xf0).empty());
  const std::vector<ChatDelta> replaced = {{ChatDelta::content, "\xef\xbf\xbd"}};
  EXPECT_EQ(cut->push(tokenizer().id_of("<|end|>").value()), replaced);
  const std::string speech(300, 'x');
  const auto parser = harmony().parser({});
  std::string early;
  for (std::size_t i = 0; i < speech.size(); ++i)
    for (const ChatDelta& delta : parser->push('x')) early += delta.text;
  EXPECT_EQ(early, speech);  // it is not held back for ever
}

TEST(ChatHarmony, AnyTokensAreRead) {
  std::mt19937 random(5);
  const std::string words = "to=functions.x json analysis final assistant user \xc3\xa9\xff\n";
  for (int round = 0; round < 20000; ++round) {
    const auto parser = harmony().parser({});
    std::int32_t calls = 0;
    const auto check = [&](const std::vector<ChatDelta>& deltas) {
      for (const ChatDelta& delta : deltas) {
        ASSERT_FALSE(delta.text.empty() && delta.kind != ChatDelta::tool_call);
        ASSERT_FALSE(first_invalid_utf8(delta.text));
        if (delta.kind == ChatDelta::tool_call) {
          ASSERT_EQ(delta.index, calls++);
        }
        if (delta.kind == ChatDelta::tool_arguments) {
          ASSERT_EQ(delta.index, calls - 1);
        }
      }
    };
    for (int i = 0; i < 30; ++i) {
      const bool control = random() % 3 == 0;
      const auto byte = static_cast<unsigned char>(words[random() % words.size()]);
      check(parser->push(control ? 256 + static_cast<std::int32_t>(random() % 8)
                                 : byte));  // 263 is beyond the tokenizer
    }
    check(parser->finish());
  }
}

}  // namespace
}  // namespace basin::text
