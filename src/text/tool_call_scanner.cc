#include "text/tool_call_scanner.h"

#include <utility>

#include "text/chat_json.h"

namespace basin::text {
namespace {

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

// The text that a JSON string stands for; nothing for what is none.
std::string unquoted(const std::string& json) {
  const auto value = parse_json(json);
  return value && value->is_string() ? value->get<std::string>() : std::string();
}

}  // namespace

void ToolCallScanner::push(std::string_view text) {
  for (const char c : text) character(c);
}

std::string ToolCallScanner::take_arguments() {
  return std::exchange(arguments_, {});
}

void ToolCallScanner::character(char c) {
  switch (state_) {
    case State::before:
      if (is_space(c)) return;
      state_ = c == '{' ? State::after_value : State::broken;
      return;
    case State::after_value:  // or the start of the object: a key, a comma or the end
      if (is_space(c) || c == ',') return;
      value_.clear();
      if (c == '"') {
        value_ = c;
        escaped_ = false;
        state_ = State::key;
      } else {
        state_ = c == '}' ? State::done : State::broken;
      }
      return;
    case State::key:
      value_ += c;
      if (c == '"' && !escaped_) {
        key_ = unquoted(value_);
        state_ = State::after_key;
      }
      escaped_ = c == '\\' && !escaped_;
      return;
    case State::after_key:
      if (is_space(c) || c == ':') return;
      start_value(c);
      return;
    case State::value:
      value_character(c);
      return;
    case State::done:
    case State::broken:
      return;
  }
}

void ToolCallScanner::start_value(char c) {
  value_.clear();
  depth_ = 0;
  in_string_ = escaped_ = false;
  quoted_ = c == '"';
  state_ = State::value;
  value_character(c);
}

void ToolCallScanner::value_character(char c) {
  const bool ends_scalar = depth_ == 0 && !in_string_ && !quoted_ && (c == ',' || c == '}' || is_space(c));
  if (ends_scalar) {
    end_value();
    if (c == '}') state_ = State::done;
    return;
  }
  // Arguments flow on at once; a string instead of an object holds their JSON, and is needed whole, as a name is.
  if (in_arguments() && !quoted_) {
    arguments_ += c;
  } else {
    value_ += c;
  }
  if (in_string_) {
    if (c == '"' && !escaped_) in_string_ = false;
    escaped_ = c == '\\' && !escaped_;
  } else if (c == '"') {
    in_string_ = true;
    escaped_ = false;
  } else if (c == '{' || c == '[') {
    ++depth_;
  } else if (c == '}' || c == ']') {
    --depth_;
  }
  const bool whole = depth_ == 0 && !in_string_ && (c == '"' || c == '}' || c == ']');
  if (whole) end_value();
}

void ToolCallScanner::end_value() {
  state_ = State::after_value;
  if (key_ == "name" && !has_name_) {
    name_ = unquoted(value_);
    has_name_ = !name_.empty();
  } else if (in_arguments() && quoted_) {
    arguments_ += unquoted(value_);
  }
}

}  // namespace basin::text
