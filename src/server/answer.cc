#include "server/answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <random>
#include <utility>

#include "engine/text_output.h"

namespace basin::server {
namespace {

constexpr auto kReplace = Json::error_handler_t::replace;

std::string new_id(std::string_view kind) {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{}-{:016x}{:08x}", kind, random(), static_cast<std::uint32_t>(random()));
}

std::int64_t characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

const char* reason_name(engine::FinishReason reason) {
  return reason == engine::FinishReason::cancelled ? "abort" : engine::name(reason);
}

Json bytes_json(std::string_view bytes) {
  Json list = Json::array();
  for (const char c : bytes) list.push_back(static_cast<unsigned char>(c));
  return list;
}

}  // namespace

Answer::Answer(Asked asked, std::string id, std::string path, std::shared_ptr<Exchange> exchange,
               const ModelInfo& model, RequestLog& log)
    : asked_(std::move(asked)),
      id_(std::move(id)),
      created_(std::time(nullptr)),
      model_(model),
      path_(std::move(path)),
      exchange_(std::move(exchange)),
      log_(log) {
  for (std::size_t prompt = 0; prompt < asked_.requests.size(); ++prompt) {
    for (std::int64_t i = 0; i < asked_.requests[prompt].choices; ++i) {
      Choice choice;
      choice.index = static_cast<std::int64_t>(choices_.size());
      choice.prompt = prompt;
      choices_.push_back(std::move(choice));
    }
    if (asked_.echo) prompts_.push_back(asked_.requests[prompt].prompt);
  }
  open_ = static_cast<std::int64_t>(choices_.size());
}

std::string Answer::sse(const Json& object) {
  return "data: " + object.dump(-1, ' ', false, kReplace) + "\n\n";
}

// As OpenAI spells it: bytes that are no text by themselves stand as escapes.
std::string Answer::token_text(std::int32_t id) const {
  if (id >= model_.tokenizer->vocabulary()) return fmt::format("<{}>", id);
  const std::string bytes = model_.tokenizer->token_bytes(id, true);
  if (bytes.empty()) return fmt::format("<{}>", id);
  if (!text::first_invalid_utf8(bytes)) return bytes;
  std::string text = "bytes:";
  for (const char c : bytes) text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return text;
}

Json Answer::usage() const {
  engine::Usage sum;
  std::size_t counted = choices_.size();  // choices of one prompt share it
  for (const Choice& choice : choices_) {
    if (choice.prompt != counted) {
      sum.prompt_tokens += choice.usage.prompt_tokens;
      sum.cached_tokens += choice.usage.cached_tokens;
      counted = choice.prompt;
    }
    sum.completion_tokens += choice.usage.completion_tokens;
    sum.kept_tokens = std::max(sum.kept_tokens, choice.usage.kept_tokens);
  }
  return {{"prompt_tokens", sum.prompt_tokens},
          {"completion_tokens", sum.completion_tokens},
          {"total_tokens", sum.prompt_tokens + sum.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", sum.cached_tokens}}},
          {"kept_tokens", sum.kept_tokens}};
}

void Answer::put_usage(Json& object) const {
  if (asked_.continuous_usage) {
    object["usage"] = usage();
  } else if (asked_.include_usage) {
    object["usage"] = nullptr;
  }
}

void Answer::take(std::size_t prompt, engine::Event&& event) {
  if (event.failure) {
    fail(api_error(event.failure->code, event.failure->message));
    return;
  }
  try {
    put(prompt, std::move(event));
  } catch (const std::exception& error) {  // an answer that cannot be written
    fail(ApiError(500, error.what()));
  }
}

void Answer::put(std::size_t prompt, engine::Event&& event) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  const auto found =
      std::ranges::find_if(choices_, [&](const Choice& choice) { return choice.prompt == prompt; });
  Choice& choice = *(found + static_cast<std::ptrdiff_t>(event.choice));
  if (!asked_.stream || keeps_text()) choice.text += event.text;
  if (!asked_.stream) {
    absorb(choice, event);
    if (event.token) choice.tokens.push_back(*event.token);
    if (event.logprob) choice.logprobs.push_back(*event.logprob);
  }
  if (!event.prompt_logprobs.empty()) choice.prompt_logprobs = std::move(event.prompt_logprobs);
  choice.usage = event.usage;
  choice.times = event.times;
  if (event.finish_reason) {
    choice.finish_reason = reason_name(*event.finish_reason);
    choice.stop_string = event.stop_string;
    choice.stop_token = event.stop_token;
    --open_;
  }
  if (asked_.stream) {
    std::string events = stream_event(choice, event);
    choice.shown_characters += characters(event.text);
    if (open_ == 0) events += stream_end();
    if (!events.empty()) {
      if (!begun_) exchange_->start_events();
      begun_ = true;
      exchange_->send(std::move(events));
    }
    if (open_ == 0) exchange_->finish();
  } else if (open_ == 0) {
    HttpResponse response;
    response.body = body().dump(-1, ' ', false, kReplace);
    exchange_->respond(std::move(response));
  }
  constexpr int kClientClosed = 499;  // as nginx has it
  if (open_ == 0)
    finish(choice.finish_reason == std::string_view("abort") ? kClientClosed : 200, choice.finish_reason);
}

void Answer::fail(const ApiError& error) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    if (begun_) {
      exchange_->send(sse(error_json(error)) + stream_end());
      exchange_->finish();
    } else {
      exchange_->respond(error_response(error));
    }
    finish(error.status(), "error");
  }
  if (on_failure) on_failure();
}

void Answer::finish(int status, const char* finish) {
  ended_ = true;
  RequestRecord record;
  record.id = id_;
  record.path = path_;
  record.status = status;
  record.stream = asked_.stream;
  record.finish = finish;
  record.choices = static_cast<std::int64_t>(choices_.size());
  for (const Choice& choice : choices_) {
    record.usage.prompt_tokens += choice.usage.prompt_tokens;
    record.usage.cached_tokens += choice.usage.cached_tokens;
    record.usage.completion_tokens += choice.usage.completion_tokens;
    record.usage.preemptions += choice.usage.preemptions;
    record.usage.kept_tokens = std::max(record.usage.kept_tokens, choice.usage.kept_tokens);
    record.times.finished_us = std::max(record.times.finished_us, choice.times.finished_us);
    if (&choice == &choices_.front()) {
      record.times.started_us = choice.times.started_us;
      record.times.first_token_us = choice.times.first_token_us;
    }
  }
  log_.add(record);
}

namespace {

class Completion : public Answer {
 public:
  Completion(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model, RequestLog& log)
      : Answer(std::move(asked), new_id("cmpl"), "/v1/completions", std::move(exchange), model, log) {}

 protected:
  std::string stream_event(Choice& choice, const engine::Event& event) override {
    Json object = head();
    std::string text = event.text;
    LogprobList list(*this, choice.shown_characters);
    if (!choice.begun && asked_.echo) {
      const std::string prompt = prompt_text(choice);
      text = prompt + text;
      list.add_prompt(choice);
      choice.shown_characters += characters(prompt);
    }
    choice.begun = true;
    if (event.logprob) list.add(*event.logprob);
    if (text.empty() && list.empty() && !event.finish_reason) return {};
    object["choices"] = Json::array({choice_json(choice, text, list)});
    put_usage(object);
    return sse(object);
  }

  std::string stream_end() override {
    std::string events;
    if (asked_.include_usage) {
      Json object = head();
      object["choices"] = Json::array();
      object["usage"] = usage();
      events = sse(object);
    }
    return events + Answer::stream_end();
  }

  Json body() override {
    Json object = head();
    object["choices"] = Json::array();
    for (const Choice& choice : choices_) {
      LogprobList list(*this, 0);
      std::string text;
      if (asked_.echo) {
        text = prompt_text(choice);
        list.add_prompt(choice);
      }
      for (const engine::TokenLogprob& logprob : choice.logprobs) list.add(logprob);
      object["choices"].push_back(choice_json(choice, text + choice.text, list));
    }
    object["usage"] = usage();
    return object;
  }

 private:
  // Four lists, as completions have them.
  class LogprobList {
   public:
    LogprobList(const Completion& answer, std::int64_t offset) : answer_(answer), offset_(offset) {}

    bool empty() const { return tokens_.empty(); }
    void add(const engine::TokenLogprob& logprob) {
      Json top = Json::object();
      // Of two tokens with one text the likelier stands.
      for (const auto& [id, value] : logprob.top) top.emplace(answer_.token_text(id), value);
      top.emplace(answer_.token_text(logprob.id), logprob.logprob);
      add(logprob.id, logprob.logprob, std::move(top));
    }
    // The first token of a prompt has no probability: nothing comes before it.
    void add_prompt(const Choice& choice) {
      if (!answer_.asked_.logprobs) return;
      add(answer_.prompts_[choice.prompt].front(), nullptr, nullptr);
      for (const engine::TokenLogprob& logprob : choice.prompt_logprobs) add(logprob);
    }
    Json json() {
      return {{"tokens", std::move(tokens_)},
              {"token_logprobs", std::move(values_)},
              {"top_logprobs", std::move(tops_)},
              {"text_offset", std::move(offsets_)}};
    }

   private:
    void add(std::int32_t id, Json value, Json top) {
      tokens_.push_back(answer_.token_text(id));
      values_.push_back(std::move(value));
      tops_.push_back(std::move(top));
      offsets_.push_back(offset_);
      if (id < answer_.model_.tokenizer->vocabulary())
        offset_ += characters(answer_.model_.tokenizer->token_bytes(id, true));
    }

    const Completion& answer_;
    std::int64_t offset_;
    Json tokens_ = Json::array(), values_ = Json::array(), tops_ = Json::array(), offsets_ = Json::array();
  };

  Json head() const {
    return {{"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", asked_.model}};
  }

  std::string prompt_text(const Choice& choice) const {
    return model_.tokenizer->decode(known(prompts_[choice.prompt]), true);
  }

  // A model may have more ids than its tokenizer.
  std::vector<std::int32_t> known(std::vector<std::int32_t> ids) const {
    std::erase_if(ids, [&](std::int32_t id) { return id >= model_.tokenizer->vocabulary(); });
    return ids;
  }

  Json choice_json(const Choice& choice, const std::string& text, LogprobList& list) const {
    Json json = {{"index", choice.index}, {"text", text}};
    json["logprobs"] = asked_.logprobs && !list.empty() ? list.json() : Json();
    json["finish_reason"] = choice.finish_reason == nullptr ? Json() : Json(choice.finish_reason);
    if (choice.finish_reason != nullptr) {
      json["stop_reason"] = choice.stop_string  ? Json(*choice.stop_string)
                            : choice.stop_token ? Json(*choice.stop_token)
                                                : Json();
    }
    return json;
  }
};

class Chat : public Answer {
 public:
  Chat(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model, RequestLog& log)
      : Answer(std::move(asked), new_id("chatcmpl"), "/v1/chat/completions", std::move(exchange), model,
               log) {
    for (const Choice& choice : choices_) said_.emplace_back(asked_, asked_.requests[choice.prompt], model_);
  }

 protected:
  std::string stream_event(Choice& choice, const engine::Event& event) override {
    std::string events;
    if (!choice.begun) events += chunk(choice, {{"role", "assistant"}, {"content", ""}}, nullptr, false);
    choice.begun = true;
    // The log-probability of a token goes with the first thing that it says, or alone.
    const engine::TokenLogprob* logprob = event.logprob ? &*event.logprob : nullptr;
    for (const text::ChatDelta& delta : said(choice).take(event)) {
      events += chunk(choice, delta_json(said(choice), delta), std::exchange(logprob, nullptr), false);
    }
    if (logprob != nullptr) events += chunk(choice, Json{{"content", ""}}, logprob, false);
    if (event.finish_reason) events += chunk(choice, Json::object(), nullptr, true);
    return events;
  }

  std::string stream_end() override {
    std::string events;
    if (asked_.include_usage) {
      Json object = head("chat.completion.chunk");
      object["choices"] = Json::array();
      object["usage"] = usage();
      events = sse(object);
    }
    return events + Answer::stream_end();
  }

  void absorb(Choice& choice, const engine::Event& event) override { said(choice).take(event); }

  Json body() override {
    Json object = head("chat.completion");
    object["choices"] = Json::array();
    for (const Choice& choice : choices_) {
      Json json = {{"index", choice.index}, {"message", message_json(said(choice))}};
      json["logprobs"] = nullptr;
      if (asked_.logprobs) {
        Json list = Json::array();
        for (const engine::TokenLogprob& logprob : choice.logprobs) list.push_back(logprob_json(logprob));
        json["logprobs"] = {{"content", std::move(list)}};
      }
      json["finish_reason"] = finish_reason(choice);
      object["choices"].push_back(std::move(json));
    }
    object["usage"] = usage();
    return object;
  }

 private:
  // What one choice has said, thought and called.
  class Said {
   public:
    Said(const Asked& asked, const engine::Request& request, const ModelInfo& model)
        : stops_(request.stops), include_stop_(request.include_stop), part_(stops_, include_stop_) {
      if (!request.show_special) parser_ = model.chat->parser(asked.chat);
    }

    /// What the event adds.
    std::vector<text::ChatDelta> take(const engine::Event& event) {
      std::vector<text::ChatDelta> deltas;
      if (!parser_) {  // all of it, as it is
        if (!event.text.empty()) add(deltas, {text::ChatDelta::content, event.text});
        return deltas;
      }
      if (event.token) {
        for (text::ChatDelta& delta : parser_->push(*event.token)) put(deltas, std::move(delta));
      }
      if (event.finish_reason) {
        for (text::ChatDelta& delta : parser_->finish()) put(deltas, std::move(delta));
        end_part(deltas);
      }
      return deltas;
    }

    struct Call {
      std::string id, name, arguments;
    };
    const std::string& content() const { return content_; }
    const std::string& reasoning() const { return reasoning_; }
    const std::vector<Call>& calls() const { return calls_; }
    /// Whether a stop string has left the last call without its end.
    bool call_is_cut() const { return part_.stop() != nullptr && kind_ == text::ChatDelta::tool_arguments; }

   private:
    // The engine has ended the answer at a stop string; what the client sees ends there, too: what is thought and what is
    // called as much as what is said.
    void put(std::vector<text::ChatDelta>& deltas, text::ChatDelta delta) {
      const bool goes_on = delta.kind == kind_ && delta.index == index_;
      if (!goes_on) end_part(deltas);
      if (part_.stop() != nullptr) return;
      if (!goes_on) {
        part_ = engine::TextOutput(stops_, include_stop_);
        kind_ = delta.kind;
        index_ = delta.index;
      }
      if (delta.kind != text::ChatDelta::tool_call) {
        delta.text = part_.push(delta.text);
        if (delta.text.empty()) return;
      }
      add(deltas, std::move(delta));
    }

    // What was held back because a stop string could have gone on.
    void end_part(std::vector<text::ChatDelta>& deltas) {
      std::string rest = part_.finish();
      if (!rest.empty()) add(deltas, {kind_, std::move(rest), index_});
    }

    void add(std::vector<text::ChatDelta>& deltas, text::ChatDelta delta) {
      switch (delta.kind) {
        case text::ChatDelta::content:
          content_ += delta.text;
          break;
        case text::ChatDelta::reasoning:
          reasoning_ += delta.text;
          break;
        case text::ChatDelta::tool_call:
          calls_.push_back({new_id("call"), delta.text, {}});
          break;
        case text::ChatDelta::tool_arguments:
          if (!calls_.empty()) calls_.back().arguments += delta.text;
          break;
      }
      deltas.push_back(std::move(delta));
    }

    std::unique_ptr<text::ChatParser> parser_;  // null: special tokens are shown, so nothing is taken apart
    std::vector<std::string> stops_;
    bool include_stop_;
    // The part that is being written: content, thoughts, or the arguments of one call.
    engine::TextOutput part_;
    text::ChatDelta::Kind kind_ = text::ChatDelta::content;
    std::int32_t index_ = 0;
    std::string content_, reasoning_;
    std::vector<Call> calls_;
  };

  Said& said(const Choice& choice) { return said_[static_cast<std::size_t>(choice.index)]; }
  const Said& said(const Choice& choice) const { return said_[static_cast<std::size_t>(choice.index)]; }

  Json finish_reason(const Choice& choice) const {
    const bool calls = !said(choice).calls().empty() && !said(choice).call_is_cut() &&
                       choice.finish_reason == std::string_view("stop");
    return calls ? "tool_calls" : choice.finish_reason;
  }

  static Json message_json(const Said& said) {
    Json message = {{"role", "assistant"}};
    message["content"] = said.content().empty() && !said.calls().empty() ? Json() : Json(said.content());
    if (!said.reasoning().empty()) message["reasoning_content"] = said.reasoning();
    for (const auto& call : said.calls()) {
      Json function = {{"name", call.name}, {"arguments", call.arguments}};
      message["tool_calls"].push_back(
          Json{{"id", call.id}, {"type", "function"}, {"function", std::move(function)}});
    }
    return message;
  }

  static Json delta_json(const Said& said, const text::ChatDelta& delta) {
    Json json;
    switch (delta.kind) {
      case text::ChatDelta::content:
        json["content"] = delta.text;
        break;
      case text::ChatDelta::reasoning:
        json["reasoning_content"] = delta.text;
        break;
      case text::ChatDelta::tool_call: {
        Json call = {{"index", delta.index},
                     {"id", said.calls().at(static_cast<std::size_t>(delta.index)).id},
                     {"type", "function"}};
        call["function"] = {{"name", delta.text}, {"arguments", ""}};
        json["tool_calls"].push_back(std::move(call));
        break;
      }
      case text::ChatDelta::tool_arguments: {
        Json call = {{"index", delta.index}};
        call["function"]["arguments"] = delta.text;
        json["tool_calls"].push_back(std::move(call));
        break;
      }
    }
    return json;
  }

  Json head(const char* kind) const {
    return {{"id", id_}, {"object", kind}, {"created", created_}, {"model", asked_.model}};
  }

  std::string chunk(const Choice& choice, Json delta, const engine::TokenLogprob* logprob, bool last) const {
    Json json = {{"index", choice.index}, {"delta", std::move(delta)}};
    json["logprobs"] = nullptr;
    if (logprob != nullptr) json["logprobs"] = {{"content", Json::array({logprob_json(*logprob)})}};
    json["finish_reason"] = last ? finish_reason(choice) : Json();
    Json object = head("chat.completion.chunk");
    object["choices"] = Json::array({std::move(json)});
    put_usage(object);
    return sse(object);
  }

  Json entry(std::int32_t id, double logprob) const {
    const std::string bytes =
        id < model_.tokenizer->vocabulary() ? model_.tokenizer->token_bytes(id, true) : std::string();
    return {{"token", token_text(id)}, {"logprob", logprob}, {"bytes", bytes_json(bytes)}};
  }

  Json logprob_json(const engine::TokenLogprob& logprob) const {
    Json json = entry(logprob.id, logprob.logprob);
    json["top_logprobs"] = Json::array();
    for (const auto& [id, value] : logprob.top) json["top_logprobs"].push_back(entry(id, value));
    return json;
  }

  std::vector<Said> said_;  // by choice
};

class Generate : public Answer {
 public:
  Generate(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model, RequestLog& log)
      : Answer(std::move(asked), new_id("gen"), "/generate", std::move(exchange), model, log) {}

 protected:
  bool keeps_text() const override { return true; }  // each event repeats all of it

  std::string stream_event(Choice& choice, const engine::Event& event) override {
    if (event.token) choice.tokens.push_back(*event.token);
    return sse(choice_json(choice));
  }

  Json body() override {
    if (choices_.size() == 1 && !asked_.list) return choice_json(choices_.front());
    Json list = Json::array();
    for (const Choice& choice : choices_) list.push_back(choice_json(choice));
    return list;
  }

 private:
  Json choice_json(const Choice& choice) const {
    Json reason;
    if (choice.finish_reason != nullptr) {
      reason["type"] = choice.finish_reason;
      if (reason["type"] == "length") reason["length"] = choice.usage.completion_tokens;
      if (choice.stop_string) reason["matched"] = *choice.stop_string;
      if (choice.stop_token) reason["matched"] = *choice.stop_token;
    }
    return {{"text", choice.text},
            {"output_ids", choice.tokens},
            {"meta_info",
             {{"id", id_},
              {"finish_reason", std::move(reason)},
              {"prompt_tokens", choice.usage.prompt_tokens},
              {"completion_tokens", choice.usage.completion_tokens},
              {"cached_tokens", choice.usage.cached_tokens},
              {"kept_tokens", choice.usage.kept_tokens},
              {"e2e_latency", static_cast<double>(choice.times.finished_us) * 1e-6}}},
            {"index", choice.index}};
  }
};

}  // namespace

std::shared_ptr<Answer> make_completion(Asked asked, std::shared_ptr<Exchange> exchange,
                                        const ModelInfo& model, RequestLog& log) {
  return std::make_shared<Completion>(std::move(asked), std::move(exchange), model, log);
}

std::shared_ptr<Answer> make_chat(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model,
                                  RequestLog& log) {
  return std::make_shared<Chat>(std::move(asked), std::move(exchange), model, log);
}

std::shared_ptr<Answer> make_generate(Asked asked, std::shared_ptr<Exchange> exchange, const ModelInfo& model,
                                      RequestLog& log) {
  return std::make_shared<Generate>(std::move(asked), std::move(exchange), model, log);
}

}  // namespace basin::server
