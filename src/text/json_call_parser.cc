// Llama 3's calls: the answer is {"name": ..., "parameters": {...}} of a function that was offered, and nothing else.
#include <algorithm>
#include <string>
#include <utility>

#include "text/chat_json.h"
#include "text/chat_parsers.h"
#include "text/tool_call_scanner.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

class JsonCallParser : public ChatParser {
 public:
  JsonCallParser(const Tokenizer& tokenizer, std::vector<std::string> functions)
      : answer_(tokenizer), functions_(std::move(functions)) {}

  std::vector<ChatDelta> push(std::int32_t id) override {
    read(answer_.push(id));
    return std::exchange(deltas_, {});
  }

  std::vector<ChatDelta> finish() override {
    read(answer_.finish());
    const bool ends_a_call = state_ == State::shown || (state_ == State::start && calls_ > 0);
    if (!ends_a_call) content(std::exchange(raw_, {}));
    return std::exchange(deltas_, {});
  }

 private:
  enum class State { start, call, shown, content };  // shown: a call whose name is known

  void read(const std::string& text) {
    std::string_view rest = text;
    while (!rest.empty() && state_ != State::content) {
      const std::string_view character = rest.substr(0, first_character(rest).bytes);
      rest.remove_prefix(character.size());
      raw_ += character;
      if (state_ == State::start) {
        start(character[0]);
      } else {
        scanner_.push(character);
        follow();
      }
    }
    if (state_ == State::content) return content(std::exchange(raw_, {}).append(rest));
    show_arguments();
  }

  void start(char c) {
    if (c == ' ' || c == '\n') return;
    state_ = c == '{' ? State::call : State::content;
    scanner_ = {};
    scanner_.push("{");
  }

  void follow() {
    if (state_ == State::call && scanner_.has_name()) {
      if (std::find(functions_.begin(), functions_.end(), scanner_.name()) == functions_.end()) {
        state_ = State::content;  // JSON, but no call
        return;
      }
      state_ = State::shown;
      arguments_shown_ = false;
      deltas_.push_back({ChatDelta::tool_call, scanner_.name(), calls_++});
    }
    if (!scanner_.finished()) return;
    if (state_ == State::call) {
      state_ = State::content;
      return;
    }
    show_arguments();
    if (!arguments_shown_) deltas_.push_back({ChatDelta::tool_arguments, "{}", calls_ - 1});
    raw_.clear();
    state_ = State::start;  // another may follow
  }

  void show_arguments() {
    if (state_ != State::shown) return;
    std::string json = scanner_.take_arguments();
    if (json.empty()) return;
    deltas_.push_back({ChatDelta::tool_arguments, std::move(json), calls_ - 1});
    arguments_shown_ = true;
  }

  void content(std::string text) {
    if (!text.empty()) deltas_.push_back({ChatDelta::content, std::move(text)});
  }

  AnswerText answer_;
  std::vector<std::string> functions_;
  State state_ = State::start;
  std::string raw_;  // of the call at work, until it is shown as one
  ToolCallScanner scanner_;
  bool arguments_shown_ = false;
  std::int32_t calls_ = 0;
  std::vector<ChatDelta> deltas_;
};

}  // namespace

std::unique_ptr<ChatParser> make_json_call_parser(const Tokenizer& tokenizer, const ChatOptions& options) {
  std::vector<std::string> functions;
  for (const std::string& tool : options.tools)
    functions.push_back(read_tool(tool)["function"]["name"].get<std::string>());
  return std::make_unique<JsonCallParser>(tokenizer, std::move(functions));
}

}  // namespace basin::text
