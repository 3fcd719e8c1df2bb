// From the engine's events to the answer of one HTTP request: all at once, or as server-sent events.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/api_error.h"
#include "server/ask.h"
#include "server/http.h"
#include "server/request_log.h"

namespace basin::server {

using Json = nlohmann::ordered_json;

/// One choice of the answer so far.
struct Choice {
  std::int64_t index = 0;  // in the answer
  std::size_t prompt = 0;  // which of the request's
  std::string text;        // all of it; kept only where the form needs it
  std::vector<std::int32_t> tokens;
  std::vector<engine::TokenLogprob> logprobs;         // of `tokens`, if asked for
  std::vector<engine::TokenLogprob> prompt_logprobs;  // likewise
  std::int64_t shown_characters = 0;                  // of the text that went out
  bool begun = false;
  const char* finish_reason = nullptr;  // "stop", "length", "abort"; null while it goes on
  std::optional<std::string> stop_string;
  std::optional<std::int32_t> stop_token;
  engine::Usage usage;
  engine::Times times;
};

class Answer {
 public:
  Answer(Asked asked, std::string id, std::string path, std::shared_ptr<Exchange> exchange,
         const ModelInfo& model, RequestLog& log);
  virtual ~Answer() = default;

  const Asked& asked() const { return asked_; }
  /// Hands out the prompts, in order; their events go to take().
  std::vector<engine::Request> take_requests() { return std::move(asked_.requests); }

  /// An event of the request of prompt `prompt`. From one thread at a time.
  void take(std::size_t prompt, engine::Event&& event);
  /// Ends the answer before it has begun, or breaks it off. Later events are ignored.
  void fail(const ApiError& error);
  /// Called when the answer fails, so that what is left of it is not computed.
  std::function<void()> on_failure;

 protected:
  /// Events for a client that streams: `choice` has taken `event` already. May be empty.
  virtual std::string stream_event(Choice& choice, const engine::Event& event) = 0;
  virtual std::string stream_end() { return "data: [DONE]\n\n"; }
  virtual Json body() = 0;
  /// An event of an answer that is given all at once.
  virtual void absorb(Choice& choice, const engine::Event& event) {
    static_cast<void>(choice), static_cast<void>(event);
  }
  /// Whether Choice::text is needed while streaming.
  virtual bool keeps_text() const { return false; }

  static std::string sse(const Json& object);
  Json usage() const;  // of all choices
  /// "usage" of an event that is not the last.
  void put_usage(Json& object) const;
  std::string token_text(std::int32_t id) const;

  Asked asked_;
  std::string id_;
  std::int64_t created_;
  const ModelInfo& model_;
  std::vector<Choice> choices_;
  std::vector<std::vector<std::int32_t>> prompts_;  // kept for echo

 private:
  void put(std::size_t prompt, engine::Event&& event);
  void finish(int status, const char* finish);

  std::string path_;
  std::shared_ptr<Exchange> exchange_;
  RequestLog& log_;
  std::mutex mutex_;
  std::int64_t open_ = 0;  // choices without an end
  bool begun_ = false, ended_ = false;
};

std::shared_ptr<Answer> make_completion(Asked asked, std::shared_ptr<Exchange> exchange,
                                        const ModelInfo& model, RequestLog& log);
std::shared_ptr<Answer> make_chat(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model,
                                  RequestLog& log);
std::shared_ptr<Answer> make_generate(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model,
                                      RequestLog& log);

}  // namespace basin::server
