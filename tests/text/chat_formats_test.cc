// Llama 3 and Gemma. The expected texts are what the models' public templates give, rendered by jinja2.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "basin/base/error.h"
#include "chat_cases.h"

namespace basin::text {
namespace {

using Messages = std::vector<Message>;

void expect_refused(const ChatFormat& format, const Messages& messages, const ChatOptions& options,
                    ErrorCode code, const char* what) {
  try {
    format.render(messages, options);
    ADD_FAILURE() << what;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr(what));
  }
}

ChatOptions with_tool() {
  ChatOptions options;
  options.tools = {R"({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}})"};
  return options;
}

const Tokenizer& llama_tokenizer() {
  static const Tokenizer made = byte_tokenizer(
      {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"}, {},
      "<|begin_of_text|>");
  return made;
}

std::unique_ptr<ChatFormat> llama(const char* more = "") {
  return find_chat_format(llama_tokenizer(), std::string("<|start_header_id|><|eot_id|>") + more, "llama");
}

constexpr const char* kNewer = "Cutting Knowledge Date: Given the following functions";

TEST(ChatLlama3, Renders) {
  const Messages messages = {
      {"system", " be brief\n"}, {"user", "\u3000hi "}, {"assistant", "<|eot_id|>"}, {"user", "x"}};
  EXPECT_EQ(llama()->name(), "llama3");
  EXPECT_EQ(marked(llama_tokenizer(), llama()->render(messages, {})),
            "«<|begin_of_text|>»«<|start_header_id|>»system«<|end_header_id|>»\n\nbe brief«<|eot_id|>»"
            "«<|start_header_id|>»user«<|end_header_id|>»\n\nhi«<|eot_id|>»"
            "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n<|eot_id|>«<|eot_id|>»"
            "«<|start_header_id|>»user«<|end_header_id|>»\n\nx«<|eot_id|>»"
            "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n");
}

TEST(ChatLlama3, DatesAndTools) {
  const Messages one = {{"user", "hi"}};
  EXPECT_EQ(marked(llama_tokenizer(), llama(kNewer)->render(one, {})),
            "«<|begin_of_text|>»«<|start_header_id|>»system«<|end_header_id|>»\n\n"
            "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n«<|eot_id|>»"
            "«<|start_header_id|>»user«<|end_header_id|>»\n\nhi«<|eot_id|>»"
            "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n");
  ChatOptions options = with_tool();
  options.date = "2026-11-30";
  const Messages calls = {{"system", "s"},
                          {"user", "1+1"},
                          {"assistant", "", "", {{"a", "add", R"({"x":[1,"é"]})"}}},
                          {"tool", "2\n\"", "", {}, "a"}};
  EXPECT_EQ(
      marked(llama_tokenizer(), llama(kNewer)->render(calls, options)),
      "«<|begin_of_text|>»«<|start_header_id|>»system«<|end_header_id|>»\n\nEnvironment: ipython\n"
      "Cutting Knowledge Date: December 2023\nToday Date: 30 Nov 2026\n\ns«<|eot_id|>»"
      "«<|start_header_id|>»user«<|end_header_id|>»\n\nGiven the following functions, please respond with a "
      "JSON for a "
      "function call with its proper arguments that best answers the given prompt.\n\nRespond in the format "
      "{\"name\": "
      "function name, \"parameters\": dictionary of argument name and its value}.Do not use variables.\n\n"
      "{\n    \"type\": \"function\",\n    \"function\": {\n        \"name\": \"add\",\n        "
      "\"parameters\": {\n"
      "            \"type\": \"object\"\n        }\n    }\n}\n\n1+1«<|eot_id|>»"
      "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n{\"name\": \"add\", \"parameters\": {\"x\": [1, "
      "\"é\"]}}"
      "«<|eot_id|>»«<|start_header_id|>»ipython«<|end_header_id|>»\n\n\"2\\n\\\"\"«<|eot_id|>»"
      "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n");
}

TEST(ChatLlama3, Refuses) {
  const Messages one = {{"user", "hi"}};
  expect_refused(*llama(), one, with_tool(), ErrorCode::unsupported, "llama3 has no tools");
  expect_refused(*llama(kNewer), {}, with_tool(), ErrorCode::invalid_argument, "first message");
  const Messages two_calls = {{"user", "x"}, {"assistant", "", "", {{"a", "f", "{}"}, {"b", "f", "{}"}}}};
  expect_refused(*llama(kNewer), two_calls, {}, ErrorCode::invalid_argument, "one tool call");
  for (const char* date : {"x", "2026-13-01", "2026-1-1", "2026-ab-01"}) {
    ChatOptions options;
    options.date = date;
    expect_refused(*llama(kNewer), one, options, ErrorCode::invalid_argument, date);
  }
}

TEST(ChatLlama3, Answers) {
  const auto answered = [](std::string_view answer, const ChatOptions& options) {
    return parsed(llama_tokenizer(), *llama(kNewer)->parser(options), answer);
  };
  EXPECT_EQ(answered("Hi {x}<|eot_id|>", {}), "content(Hi {x})");
  EXPECT_EQ(answered(R"({"name": "add", "parameters": {}})", {}),
            R"(content({"name": "add", "parameters": {}}))");
  EXPECT_EQ(answered(R"({"name": "add", "parameters": {"x": {"y": "}"}}}<|eot_id|>)", with_tool()),
            R"(call0(add) args0({"x": {"y": "}"}}))");
  EXPECT_EQ(answered("<|python_tag|>{\"name\": \"add\"}\n{\"parameters\": {\"a\": 1}, \"name\": \"add\"}",
                     with_tool()),
            "call0(add) args0({}) call1(add) args1({\"a\": 1})");
  EXPECT_EQ(answered(R"({"name": "Bob", "age": 3} is he)", with_tool()),
            R"(content({"name": "Bob", "age": 3} is he))");
  EXPECT_EQ(answered(R"({"nothing": 1})", with_tool()), R"(content({"nothing": 1}))");
  EXPECT_EQ(answered(" {", with_tool()), "content( {)");
  EXPECT_EQ(answered("{\"name\": \"add\"}\n", with_tool()), "call0(add) args0({})");
  EXPECT_EQ(answered("{\u00e9 and \u00e9", with_tool()), "content({\u00e9 and \u00e9)");
  EXPECT_EQ(answered("\u00e9", with_tool()), "content(\u00e9)");
  EXPECT_EQ(answered("No { here", with_tool()), "content(No { here)");
  EXPECT_EQ(answered(R"({"name": "add", "parameters": {"x")", with_tool()), R"(call0(add) args0({"x"))");
}

const Tokenizer& gemma_tokenizer() {
  static const Tokenizer made = byte_tokenizer({"<bos>", "<start_of_turn>", "<end_of_turn>"}, {}, "<bos>");
  return made;
}

TEST(ChatGemma, Renders) {
  const auto gemma =
      find_chat_format(gemma_tokenizer(), "<start_of_turn> first_user_prefix <end_of_turn>", "gemma3");
  EXPECT_EQ(gemma->name(), "gemma");
  const Messages messages = {{"system", " sys "},
                             {"user", " hi\n"},
                             {"assistant", "<end_of_turn>"},
                             {"user", "<start_of_turn>model"}};
  EXPECT_EQ(marked(gemma_tokenizer(), gemma->render(messages, {})),
            "«<bos>»«<start_of_turn>»user\n sys \n\nhi«<end_of_turn>»\n"
            "«<start_of_turn>»model\n<end_of_turn>«<end_of_turn>»\n"
            "«<start_of_turn>»user\n<start_of_turn>model«<end_of_turn>»\n«<start_of_turn>»model\n");
  EXPECT_THAT(gemma_tokenizer().stops(), testing::ElementsAre(258));
  EXPECT_EQ(parsed(gemma_tokenizer(), *gemma->parser({}), "<b>Hi</b>\n<end_of_turn>"),
            "content(<b>Hi</b>\n)");

  expect_refused(*gemma, {{"assistant", "x"}}, {}, ErrorCode::invalid_argument, "in turn; message 1");
  expect_refused(*gemma, {{"user", "x"}, {"user", "y"}}, {}, ErrorCode::invalid_argument, "message 2");
  expect_refused(*gemma, {{"user", "x"}, {"system", "y"}}, {}, ErrorCode::invalid_argument, "'system'");
  expect_refused(*gemma, {{"user", "x"}}, with_tool(), ErrorCode::unsupported, "gemma has no tools");
  const auto second = find_chat_format(
      gemma_tokenizer(), "<start_of_turn><end_of_turn>{{ raise_exception('System role not supported') }}",
      "gemma2");
  expect_refused(*second, {{"system", "x"}, {"user", "y"}}, {}, ErrorCode::invalid_argument,
                 "no system message");
}

TEST(ChatFormats, OfLlamaAndGemmaAreFoundByTheirTokens) {
  EXPECT_EQ(find_chat_format(llama_tokenizer(), "", "llama")->name(), "llama3");
  EXPECT_EQ(find_chat_format(gemma_tokenizer(), "", "gemma3")->name(), "gemma");
}

}  // namespace
}  // namespace basin::text
