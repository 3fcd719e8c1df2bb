// <think> and <tool_call>. The marks may be tokens or spelled out; what could be the start of one waits for the rest.
#include <algorithm>
#include <string>
#include <utility>

#include "text/chat_parsers.h"
#include "text/chat_writer.h"
#include "text/tool_call_scanner.h"

namespace basin::text {
namespace {

constexpr std::string_view kThink = "<think>", kEndThink = "</think>";
constexpr std::string_view kCall = "<tool_call>", kEndCall = "</tool_call>";

// Bytes at the end of `text` that could become `mark`.
std::size_t possible_start(std::string_view text, std::string_view mark) {
  for (std::size_t bytes = std::min(text.size(), mark.size() - 1); bytes > 0; --bytes) {
    if (text.ends_with(mark.substr(0, bytes))) return bytes;
  }
  return 0;
}

class TaggedParser : public ChatParser {
 public:
  TaggedParser(const Tokenizer& tokenizer, Tags tags)
      : tokenizer_(tokenizer),
        answer_(tokenizer),
        tags_(tags),
        state_(tags.in_thought ? State::thought : State::content),
        may_think_(tags.thinks && !tags.in_thought) {}

  std::vector<ChatDelta> push(std::int32_t id) override {
    // Marks that are control tokens would have no text.
    std::string text = answer_.push(id);
    if (text.empty()) text = control_mark(id);
    pending_ += text;
    while (step()) {
    }
    return std::exchange(deltas_, {});
  }

  std::vector<ChatDelta> finish() override {
    pending_ += answer_.finish();
    while (step()) {
    }
    plain(std::exchange(pending_, {}));
    if (state_ == State::call) {
      end_call({});
    } else {
      put(std::exchange(held_, {}));
    }
    return std::exchange(deltas_, {});
  }

 private:
  enum class State { content, thought, call };

  std::string control_mark(std::int32_t id) const {
    for (const std::string_view mark : {kThink, kEndThink, kCall, kEndCall}) {
      if (tokenizer_.id_of(mark) == id) return std::string(mark);
    }
    return {};
  }

  // Takes the next mark out of pending_ with what stands before it, or, without one, all that is no start of a mark.
  bool step() {
    std::string_view mark;
    std::size_t at = std::string::npos, waits = 0;
    const auto look_for = [&](std::string_view wanted) {
      const std::size_t found = pending_.find(wanted);
      if (found < at) {
        at = found;
        mark = wanted;
      }
      waits = std::max(waits, possible_start(pending_, wanted));
    };
    if (state_ == State::thought) look_for(kEndThink);
    if (state_ == State::call) look_for(kEndCall);
    if (state_ == State::content && tags_.tools) look_for(kCall);
    if (state_ == State::content && may_think_) look_for(kThink);
    if (at == std::string::npos) {
      plain(pending_.substr(0, pending_.size() - waits));
      pending_.erase(0, pending_.size() - waits);
      return false;
    }
    const std::string before = pending_.substr(0, at);
    pending_.erase(0, at + mark.size());
    plain(before);
    passed(mark);
    return true;
  }

  void passed(std::string_view mark) {
    if (mark == kThink && !may_think_)
      return plain(mark);  // there was text before it: it is a word like others
    held_.clear();         // newlines around marks belong to them
    if (mark == kEndCall) end_call(kEndCall);
    if (mark == kCall) {
      scanner_ = {};
      raw_call_.clear();
      call_shown_ = arguments_shown_ = false;
    }
    state_ = mark == kThink ? State::thought : mark == kCall ? State::call : State::content;
    may_think_ = false;
    after_mark_ = true;
  }

  // Text of the state at work, without marks.
  void plain(std::string_view text) {
    if (state_ == State::call) return call_text(text);
    if (after_mark_) text = trim_newlines_left(text);
    const std::size_t end = text.find_last_not_of('\n') + 1;
    if (end > 0) {
      put(std::exchange(held_, {}) + std::string(text.substr(0, end)));
      after_mark_ = may_think_ = false;
    }
    held_ += text.substr(end);  // newlines may stand before a mark
  }

  void put(std::string text) {
    if (text.empty()) return;
    const auto kind = state_ == State::thought ? ChatDelta::reasoning : ChatDelta::content;
    deltas_.push_back({kind, std::move(text)});
  }

  void call_text(std::string_view text) {
    raw_call_ += text;
    scanner_.push(text);
    if (!scanner_.has_name()) return;
    if (!call_shown_) deltas_.push_back({ChatDelta::tool_call, scanner_.name(), calls_++});
    call_shown_ = true;
    show_arguments(scanner_.take_arguments());
  }

  void show_arguments(std::string json) {
    if (json.empty()) return;
    deltas_.push_back({ChatDelta::tool_arguments, std::move(json), calls_ - 1});
    arguments_shown_ = true;
  }

  // What names no function is no call: the model's words are shown as they are.
  void end_call(std::string_view mark) {
    if (call_shown_) {
      if (!arguments_shown_ && !mark.empty()) show_arguments("{}");
      return;
    }
    state_ = State::content;
    put(std::string(kCall) + raw_call_ + std::string(mark));
  }

  const Tokenizer& tokenizer_;
  AnswerText answer_;
  Tags tags_;
  State state_;
  bool may_think_;           // nothing but newlines has come yet
  bool after_mark_ = false;  // newlines are skipped
  std::string pending_;      // not looked at, or perhaps the start of a mark
  std::string held_;         // newlines, which are dropped before a mark
  ToolCallScanner scanner_;
  std::string raw_call_;
  bool call_shown_ = false, arguments_shown_ = false;
  std::int32_t calls_ = 0;
  std::vector<ChatDelta> deltas_;
};

}  // namespace

std::unique_ptr<ChatParser> make_tagged_parser(const Tokenizer& tokenizer, Tags tags) {
  return std::make_unique<TaggedParser>(tokenizer, tags);
}

}  // namespace basin::text
