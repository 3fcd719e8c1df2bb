#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "text/chat_parsers.h"
#include "text/harmony_tokens.h"
#include "text/tokenizer.h"

namespace basin::text {
namespace {

// What stands between <|start|> and <|message|>, word by word.
struct Header {
  std::string role = "assistant", recipient, channel;

  bool is_call() const {
    return !recipient.empty() && recipient != "all" && recipient != "user" && recipient != "assistant";
  }
  std::string function() const {
    constexpr std::string_view kSpace = "functions.";
    return recipient.starts_with(kSpace) && recipient.size() > kSpace.size() ? recipient.substr(kSpace.size())
                                                                             : recipient;
  }
};

// The text of a header, cut at control tokens.
struct HeaderText {
  enum Part { before, channel, type } at = before;  // before <|channel|>, after it, after <|constrain|>
  std::array<std::string, 3> parts;
  bool role_known = true;  // the prompt wrote it, or nothing did
  std::size_t bytes = 0;

  void add(std::string_view text) {
    parts[at] += text;
    bytes += text.size();
  }
};

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text) {
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
    if (!space) word += c;
    if (space && !word.empty()) words.push_back(std::exchange(word, {}));
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

Header read_header(const HeaderText& text) {
  Header header;
  const auto recipient = [&](const std::string& word) {
    const bool to = word.starts_with("to=");
    if (!to && !word.starts_with("functions.")) return false;
    if (header.recipient.empty()) header.recipient = word.substr(to ? 3 : 0);
    return true;
  };
  std::vector<std::string> words = words_of(text.parts[HeaderText::before]);
  if (!words.empty() && !text.role_known && !words[0].starts_with("to=")) {
    header.role = words[0];  // of a tool it is the tool's name
    words.erase(words.begin());
  }
  for (const std::string& word : words) recipient(word);
  for (const std::string& word : words_of(text.parts[HeaderText::channel])) {
    if (!recipient(word) && header.channel.empty()) header.channel = word;
  }
  for (const std::string& word : words_of(text.parts[HeaderText::type])) recipient(word);
  return header;
}

// `text` without `word` at its start, if it is there.
std::string without_word(std::string text, std::string_view word) {
  const std::size_t begin = text.find_first_not_of(" \n");
  if (word.empty() || begin == std::string::npos || !std::string_view(text).substr(begin).starts_with(word))
    return text;
  return text.substr(begin + word.size());
}

class HarmonyParser : public ChatParser {
 public:
  HarmonyParser(const Tokenizer& tokenizer, const HarmonyTokens& tokens)
      : tokens_(tokens), answer_(tokenizer) {}

  std::vector<ChatDelta> push(std::int32_t id) override {
    if (id == tokens_.start) {
      end_message();
      state_ = State::header;
      header_.role_known = false;
    } else if (id == tokens_.message) {
      if (state_ != State::content) begin_content();
    } else if (id == tokens_.channel) {
      if (state_ == State::content) end_message();
      state_ = State::header;
      header_part(HeaderText::channel);
    } else if (id == tokens_.constrain) {
      if (state_ == State::header) header_part(HeaderText::type);
    } else if (id == tokens_.end || id == tokens_.done || id == tokens_.call) {
      end_message();
    } else {
      text(answer_.push(id));
    }
    return std::exchange(deltas_, {});
  }

  std::vector<ChatDelta> finish() override {
    end_message();
    return std::exchange(deltas_, {});
  }

 private:
  enum class State { between, header, content };

  // Longer than any header: the model began to speak without one.
  static constexpr std::size_t kLongestHeader = 256;

  void header_part(HeaderText::Part part) {
    header_.add(answer_.finish());
    header_.at = part;
  }

  void text(const std::string& text) {
    if (text.empty()) return;
    if (state_ == State::content) return put(text);
    state_ = State::header;  // between messages, <|start|> was left out
    header_.add(text);
    if (header_.bytes > kLongestHeader) speak_without_header();
  }

  void begin_content() {
    header_.add(answer_.finish());
    message_ = read_header(header_);
    header_ = {};
    state_ = State::content;
    arguments_shown_ = false;
    if (ours() && message_.is_call())
      deltas_.push_back({ChatDelta::tool_call, message_.function(), calls_++});
  }

  // What was taken for a header is content; role and channel are believed.
  void speak_without_header() {
    message_ = read_header(header_);
    message_.recipient.clear();
    const std::string said = header_.at == HeaderText::before
                                 ? without_word(header_.parts[HeaderText::before],
                                                header_.role_known ? "assistant" : message_.role)
                                 : without_word(header_.parts[HeaderText::channel], message_.channel) +
                                       header_.parts[HeaderText::type];
    header_ = {};
    state_ = State::content;
    if (!words_of(said).empty()) put(said);
  }

  void end_message() {
    const std::string rest = answer_.finish();
    if (state_ == State::header) {
      header_.add(rest);
      speak_without_header();
    } else if (state_ == State::content) {
      put(rest);
      if (ours() && message_.is_call() && !arguments_shown_) put("{}");
    }
    header_ = {};
    message_ = {};
    state_ = State::between;
  }

  bool ours() const { return message_.role == "assistant"; }

  void put(const std::string& text) {
    if (text.empty() || !ours()) return;
    if (message_.is_call()) {
      deltas_.push_back({ChatDelta::tool_arguments, text, calls_ - 1});
      arguments_shown_ = true;
    } else {
      deltas_.push_back({message_.channel == "analysis" ? ChatDelta::reasoning : ChatDelta::content, text});
    }
  }

  HarmonyTokens tokens_;
  AnswerText answer_;
  State state_ = State::header;  // the prompt ends with <|start|>assistant
  HeaderText header_;
  Header message_;
  bool arguments_shown_ = false;
  std::int32_t calls_ = 0;
  std::vector<ChatDelta> deltas_;
};

}  // namespace

std::unique_ptr<ChatParser> make_harmony_parser(const Tokenizer& tokenizer, const HarmonyTokens& tokens) {
  return std::make_unique<HarmonyParser>(tokenizer, tokens);
}

}  // namespace basin::text
