// Answers of a chat from the engine's events: what is said, thought and called, whole and streamed.
#include "server/answer.h"

#include <gtest/gtest.h>

#include "engine/text_output.h"
#include "models/model.h"
#include "text/chat_cases.h"
#include "text/chat_formats.h"

namespace basin::server {
namespace {

class Kept : public Exchange {
 public:
  void respond(HttpResponse response) override { whole = std::move(response); }
  void start_events() override { started = true; }
  void send(std::string events) override { streamed += events; }
  void finish() override { finished = true; }
  void on_gone(std::function<void()>) override {}

  HttpResponse whole;
  std::string streamed;
  bool started = false, finished = false;
};

class AnswerTest : public testing::Test {
 protected:
  AnswerTest() {
    config.vocabulary = tokenizer.vocabulary();
    model.name = "m";
    model.config = &config;
    model.tokenizer = &tokenizer;
    model.chat = format.get();
  }

  static engine::Request plain_request() {
    engine::Request request;
    request.prompt = {1};
    return request;
  }

  // Runs an answer through, one event for each of its tokens.
  std::shared_ptr<Kept> run(std::string_view answer, bool stream, engine::Request request = plain_request()) {
    Asked asked;
    asked.model = "m";
    asked.stream = stream;
    asked.chat.tools = {R"({"type":"function","function":{"name":"f"}})"};
    engine::TextOutput text(request.stops, request.include_stop);
    asked.requests.push_back(std::move(request));
    const auto kept = std::make_shared<Kept>();
    const auto made = make_chat(std::move(asked), kept, model, log);
    made->take_requests();
    for (const std::int32_t id : tokenizer.encode(answer, true)) {
      engine::Event event;
      event.token = id;
      event.text = text.push(tokenizer.token_bytes(id, false));
      if (text.stop() != nullptr) event.finish_reason = engine::FinishReason::stop;
      made->take(0, std::move(event));
      if (text.stop() != nullptr) return kept;
    }
    engine::Event end;
    end.finish_reason = engine::FinishReason::stop;
    made->take(0, std::move(end));
    return kept;
  }

  static Json message(const Kept& kept) { return Json::parse(kept.whole.body)["choices"][0]["message"]; }

  // The message that a client puts together from the events.
  static Json put_together(const std::string& streamed, std::string& finish_reason) {
    Json message = {{"role", nullptr}, {"content", ""}};
    for (std::size_t at = 0; at < streamed.size();) {
      const std::size_t end = streamed.find("\n\n", at);
      const std::string data = streamed.substr(at + 6, end - at - 6);
      at = end + 2;
      if (data == "[DONE]") break;
      const Json choice = Json::parse(data)["choices"][0];
      const Json& delta = choice["delta"];
      if (delta.contains("role")) message["role"] = delta["role"];
      if (delta.contains("content"))
        message["content"] = message["content"].get<std::string>() + delta["content"].get<std::string>();
      if (delta.contains("reasoning_content"))
        message["reasoning_content"] =
            message.value("reasoning_content", "") + delta["reasoning_content"].get<std::string>();
      if (delta.contains("tool_calls")) {
        for (const Json& call : delta["tool_calls"]) {
          const auto index = call["index"].get<std::size_t>();
          if (call.contains("id")) {
            EXPECT_EQ(message["tool_calls"].size(), index);
            Json whole = call;
            whole.erase("index");
            message["tool_calls"].push_back(whole);
          } else {
            std::string& arguments =
                message["tool_calls"][index]["function"]["arguments"].get_ref<std::string&>();
            arguments += call["function"]["arguments"].get<std::string>();
          }
        }
      }
      if (!choice["finish_reason"].is_null()) finish_reason = choice["finish_reason"];
    }
    return message;
  }

  text::Tokenizer tokenizer = text::byte_tokenizer({"<|im_start|>", "<|im_end|>"},
                                                   {"<think>", "</think>", "<tool_call>", "</tool_call>"});
  std::unique_ptr<text::ChatFormat> format = text::make_qwen(tokenizer, {.thinks = true});
  models::ModelConfig config;
  ModelInfo model;
  RequestLog log{true};
};

constexpr std::string_view kCalls =
    "<think>\nWhich one?\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": "
    "\"\xc3\xa4\"}}\n</tool_call>\n"
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

// Cannot be told the first thing.
class Deaf : public Kept {
 public:
  void respond(HttpResponse response) override {
    if (!std::exchange(told, true)) throw std::runtime_error("no room");
    Kept::respond(std::move(response));
  }
  void send(std::string events) override {
    if (!std::exchange(told, true)) throw std::runtime_error("no room");
    Kept::send(std::move(events));
  }
  bool told = false;
};

TEST_F(AnswerTest, WhatCannotBeWrittenFailsTheAnswerAndNothingElse) {
  for (const bool stream : {false, true}) {
    Asked asked;
    asked.model = "m";
    asked.stream = stream;
    asked.requests.push_back(plain_request());
    const auto kept = std::make_shared<Deaf>();
    const auto made = make_completion(std::move(asked), kept, model, log);
    int failures = 0;
    made->on_failure = [&] { ++failures; };
    made->take_requests();
    engine::Event event;
    event.text = "x";
    event.finish_reason = engine::FinishReason::stop;
    EXPECT_NO_THROW(made->take(0, std::move(event)));
    EXPECT_EQ(failures, 1);
    EXPECT_NE((stream ? kept->streamed : kept->whole.body).find("no room"), std::string::npos);
    EXPECT_EQ(stream ? 500 : kept->whole.status, 500);
    EXPECT_EQ(kept->finished, stream);
  }
}

TEST_F(AnswerTest, CallsAndThoughtsStandApart) {
  const auto kept = run(kCalls, false);
  const Json said = message(*kept);
  EXPECT_EQ(said["reasoning_content"].get<std::string>().find("Which one?"), 0u) << said;
  EXPECT_EQ(said["content"].get<std::string>().find("Let me see."), 0u) << said;
  ASSERT_EQ(said["tool_calls"].size(), 2u) << said;
  EXPECT_EQ(said["tool_calls"][0]["function"]["name"], "f");
  EXPECT_EQ(Json::parse(said["tool_calls"][0]["function"]["arguments"].get<std::string>())["x"], "\xc3\xa4");
  EXPECT_NE(said["tool_calls"][0]["id"], said["tool_calls"][1]["id"]);
  EXPECT_EQ(Json::parse(kept->whole.body)["choices"][0]["finish_reason"], "tool_calls");
}

TEST_F(AnswerTest, AStreamPutTogetherIsTheWholeAnswer) {
  for (const std::string_view answer :
       {kCalls, std::string_view("plain text \xe2\x82\xac"), std::string_view("<think>only")}) {
    Json whole = message(*run(answer, false));
    std::string reason;
    const auto kept = run(answer, true);
    Json streamed = put_together(kept->streamed, reason);
    EXPECT_TRUE(kept->started && kept->finished);
    if (whole["content"].is_null()) whole["content"] = "";
    for (Json* message : {&whole, &streamed}) {
      if (!message->contains("tool_calls")) continue;
      for (Json& call : (*message)["tool_calls"]) call.erase("id");  // each answer has its own
    }
    EXPECT_EQ(streamed, whole) << answer;
    EXPECT_EQ(reason, whole.contains("tool_calls") ? "tool_calls" : "stop");
  }
}

TEST_F(AnswerTest, AStopStringEndsWhatIsSaid) {
  engine::Request request = plain_request();
  request.stops = {"ST\xc3\x96P"};
  std::string reason;
  for (const bool include : {false, true}) {
    request.include_stop = include;
    const std::string want = include ? "before ST\xc3\x96P" : "before ";
    EXPECT_EQ(message(*run("before ST\xc3\x96P after", false, request))["content"], want);
    EXPECT_EQ(put_together(run("before ST\xc3\x96P after", true, request)->streamed, reason)["content"],
              want);
  }
}

TEST_F(AnswerTest, AStopStringEndsWhatIsThoughtAndCalled) {
  const auto expect = [&](std::string_view stop, std::string_view thought, std::string_view content,
                          const std::vector<std::string>& arguments, std::string_view finish) {
    engine::Request request = plain_request();
    request.stops = {std::string(stop)};
    const auto kept = run(kCalls, false, request);
    std::string reason;
    const Json whole = message(*kept), streamed = put_together(run(kCalls, true, request)->streamed, reason);
    EXPECT_EQ(Json::parse(kept->whole.body)["choices"][0]["finish_reason"], finish) << stop;
    EXPECT_EQ(reason, finish) << stop;
    for (const Json& said : {whole, streamed}) {
      EXPECT_EQ(said.value("reasoning_content", ""), thought) << stop;
      EXPECT_EQ(said["content"].is_null() ? "" : said["content"].get<std::string>(), content) << stop;
      std::vector<std::string> called;
      for (const Json& call : said.value("tool_calls", Json::array()))
        called.push_back(call["function"]["arguments"]);
      EXPECT_EQ(called, arguments) << stop;
    }
  };
  const Json all = message(*run(kCalls, false));
  const std::string thought = all["reasoning_content"], content = all["content"];
  const std::string first = all["tool_calls"][0]["function"]["arguments"];
  expect("ich", thought.substr(0, thought.find("ich")), "", {}, "stop");
  expect("ee", thought, content.substr(0, content.find("ee")), {}, "stop");
  expect("\xc3\xa4", thought, content, {first.substr(0, first.find("\xc3\xa4"))}, "stop");
  // What may begin a stop string and does not is shown where it belongs.
  expect("?never", thought, content, {first, "{}"}, "tool_calls");
  expect("}}}}", thought, content, {first, "{}"}, "tool_calls");
}

TEST_F(AnswerTest, AFailureInAStreamIsAnEvent) {
  Asked asked;
  asked.stream = true;
  asked.requests.push_back(plain_request());
  const auto kept = std::make_shared<Kept>();
  const auto made = make_chat(std::move(asked), kept, model, log);
  bool told = false;
  made->on_failure = [&] { told = true; };
  engine::Event first;
  first.token = 'a';
  first.text = "a";
  made->take(0, std::move(first));
  engine::Event failure;
  failure.failure = engine::Failure{ErrorCode::internal, "broken"};
  made->take(0, std::move(failure));
  EXPECT_TRUE(told && kept->finished);
  EXPECT_NE(kept->streamed.find("\"error\":{\"message\":\"broken\",\"type\":\"server_error\""),
            std::string::npos);
  EXPECT_TRUE(kept->streamed.ends_with("data: [DONE]\n\n"));
  EXPECT_EQ(log.counts().at({"/v1/chat/completions", 500}), 1);
}

}  // namespace
}  // namespace basin::server
