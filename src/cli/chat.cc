// basin chat: a conversation in the terminal, with a model in this process or a server.
#include <fmt/format.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "cli/answer.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/reply.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "server/http_client.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace basin::cli {
namespace {

using nlohmann::ordered_json;

/// Somebody to talk to: answers a conversation, and shows the answer while it comes.
class Partner {
 public:
  virtual ~Partner() = default;
  virtual std::string answer(const std::vector<text::Message>& messages) = 0;
};

class RemotePartner : public Partner {
 public:
  explicit RemotePartner(const ChatArgs& args)
      : args_(args), client_(*args.url, client_key(args.api_key), interrupt_flag()) {}

  std::string answer(const std::vector<text::Message>& messages) override {
    ordered_json list = ordered_json::array();
    for (const text::Message& message : messages)
      list.push_back({{"role", message.role}, {"content", message.content}});
    ordered_json body = {{"messages", list}, {"stream", true}, {"temperature", args_.sampling.temperature}};
    if (args_.max_tokens) body["max_tokens"] = *args_.max_tokens;
    if (args_.sampling.top_p != 1.0) body["top_p"] = args_.sampling.top_p;
    if (args_.model.stream.window) {
      body["window"] = *args_.model.stream.window;
      body["sink_tokens"] = args_.model.stream.sink_tokens;
      body["positions"] =
          args_.model.stream.positions == engine::PositionMode::in_cache ? "in-cache" : "absolute";
    }
    std::string whole;
    std::optional<std::string> problem;
    server::EventReader reader;
    const auto on_event = [&](std::string_view data) {
      const auto event = nlohmann::json::parse(data, nullptr, false);
      problem = error_of(event);
      if (const auto thought = string_at(event, "/choices/0/delta/reasoning_content"))
        print_thought(*thought);
      if (const auto said = string_at(event, "/choices/0/delta/content")) {
        if (!said->empty()) write_answer(*said);
        whole += *said;
      }
      return !problem;
    };
    const server::HttpReply reply = client_.request(
        "POST", "/v1/chat/completions", body.dump(),
        [&](std::string_view bytes) { return reader.push(bytes, on_event) && !interrupt_flag()->load(); });
    if (reply.status != 200)
      problem = error_of(nlohmann::json::parse(reply.body, nullptr, false)).value_or(reply.body);
    if (problem) throw Error(ErrorCode::io, fmt::format("the server says: {}", problem->substr(0, 500)));
    return whole;
  }

 private:
  const ChatArgs& args_;
  server::HttpClient client_;
};

// A batch of one. Its prefix cache knows the conversation, so that each turn computes what is new.
class LocalPartner : public Partner {
 public:
  explicit LocalPartner(const ChatArgs& args)
      : args_(args),
        session_(args.model),
        format_(text::find_chat_format(session_.tokenizer(false), session_.loaded.chat_template,
                                       session_.config().architecture)),
        runner_(*session_.loaded.model, session_.pool, engine::pass_options(args.model.stream),
                {args.model.stream.page_tokens, page_count(args, session_.config()), 1,
                 args.model.stream.chunk_tokens}),
        engine_(runner_, session_.pool, session_.loaded.tokenizer.get(), options(args)) {}

  std::string answer(const std::vector<text::Message>& messages) override {
    text::ChatOptions chat;
    chat.default_system = !args_.system;
    engine::Request request;
    request.prompt = format_->render(messages, chat);
    const auto prompt_tokens = static_cast<std::int64_t>(request.prompt.size());
    check_fits(prompt_tokens + 1, session_.config(), args_.model.stream, "the conversation",
               "begin anew with /new");
    const std::int64_t room =
        args_.model.stream.window ? std::int64_t{1} << 30 : session_.config().context - prompt_tokens;
    request.max_tokens = std::min(args_.max_tokens.value_or(room), room);
    request.sampling.options = args_.sampling;
    request.policy = {args_.model.stream.sink_tokens, args_.model.stream.window.value_or(0),
                      args_.model.stream.positions == engine::PositionMode::in_cache};
    const auto events = std::make_shared<Events>();
    request.on_event = [events](engine::Event&& event) { events->put(std::move(event)); };
    const auto id = engine_.submit(std::move(request));
    if (!id) throw Error(ErrorCode::internal, "the engine takes no request");
    // When showing it fails, nothing more is to be computed.
    const struct Cancel {
      engine::Engine& engine;
      std::uint64_t id;
      ~Cancel() { engine.cancel(id); }
    } cancel{engine_, *id};
    AnswerReader reader(format_->parser(chat));
    std::string whole;
    const auto show = [&](const Answer& part) {
      print_thought(part.thought);
      if (!part.said.empty()) write_answer(part.said);
      whole += part.said;
    };
    for (;;) {
      const std::optional<engine::Event> arrived = events->take();
      if (interrupt_flag()->load()) engine_.cancel(*id);
      if (!arrived) continue;
      const engine::Event& event = *arrived;
      if (event.failure) throw Error(event.failure->code, event.failure->message);
      if (event.token) show(reader.push(*event.token));
      if (event.finish_reason) break;
    }
    show(reader.finish());
    return whole;
  }

 private:
  // What comes of one answer, from the engine's thread.
  class Events {
   public:
    void put(engine::Event&& event) {
      const std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
      arrived_.notify_one();
    }
    // Nothing when none comes for a while.
    std::optional<engine::Event> take() {
      std::unique_lock lock(mutex_);
      if (!arrived_.wait_for(lock, std::chrono::milliseconds(100), [&] { return !events_.empty(); }))
        return {};
      engine::Event event = std::move(events_.front());
      events_.pop_front();
      return event;
    }

   private:
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::deque<engine::Event> events_;
  };

  // The conversation as it is computed, and once more as it is remembered.
  static std::int64_t page_count(const ChatArgs& args, const models::ModelConfig& config) {
    const engine::StreamOptions& stream = args.model.stream;
    const std::int64_t context = config.context / stream.page_tokens + 1;
    const kv::Policy policy{stream.sink_tokens, stream.window.value_or(1), true};
    return 2 * context + kv::page_bound(policy, stream.page_tokens, stream.chunk_tokens);
  }

  static engine::EngineOptions options(const ChatArgs& args) {
    engine::EngineOptions options;
    options.batch.max_sequences = 1;
    options.batch.max_batch_tokens = args.model.stream.chunk_tokens;
    return options;
  }

  const ChatArgs& args_;
  Session session_;
  std::unique_ptr<text::ChatFormat> format_;
  engine::ModelRunner runner_;
  engine::Engine engine_;  // last: its thread uses the rest
};

}  // namespace

int run(const ChatArgs& args) {
  std::unique_ptr<Partner> partner;
  if (args.url) {
    partner = std::make_unique<RemotePartner>(args);
  } else {
    partner = std::make_unique<LocalPartner>(args);
  }
  const bool terminal = isatty(STDIN_FILENO) == 1;
  if (terminal) print_note("/new begins anew, /quit or Ctrl-D ends");
  std::vector<text::Message> messages;
  const auto begin = [&] {
    messages.clear();
    if (args.system && !args.system->empty()) messages.push_back({"system", *args.system});
  };
  begin();
  for (std::string line;;) {
    if (terminal) std::cerr << "> " << std::flush;
    if (!std::getline(std::cin, line)) break;
    throw_if_interrupted();
    if (line == "/quit") break;
    if (line == "/new") {
      begin();
      continue;
    }
    if (line.empty()) continue;
    try {
      if (const auto offset = text::first_invalid_utf8(line)) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("the line is not UTF-8: invalid byte at offset {}", *offset));
      }
      messages.push_back({"user", line});
      const std::string answer = partner->answer(messages);
      write_stdout("\n");
      throw_if_interrupted();
      messages.push_back({"assistant", answer});
    } catch (const Error& error) {
      if (!terminal || error.code() == ErrorCode::cancelled) throw;
      // Whoever sits there can say it otherwise, or begin anew.
      if (!messages.empty() && messages.back().role == "user") messages.pop_back();
      print_error(error.what(), error.hint());
    }
  }
  throw_if_interrupted();
  return 0;
}

}  // namespace basin::cli
