// Reads {"name": "...", "arguments": {...}} as it is being written.
#pragma once

#include <string>
#include <string_view>

namespace basin::text {

class ToolCallScanner {
 public:
  /// Takes more of the text. What it makes known is added to name and arguments.
  void push(std::string_view text);

  /// The name of the function, once it is whole.
  bool has_name() const { return has_name_; }
  const std::string& name() const { return name_; }

  /// The object has ended, or it is none.
  bool finished() const { return state_ == State::done || state_ == State::broken; }

  /// The JSON of the arguments as far as it has come; taken away by the caller.
  std::string take_arguments();

 private:
  enum class State { before, key, after_key, value, after_value, done, broken };

  void character(char c);
  void start_value(char c);
  void value_character(char c);
  void end_value();
  bool in_arguments() const { return key_ == "arguments" || key_ == "parameters"; }

  State state_ = State::before;
  std::string key_, value_;  // of the member at work; value_ only where it is wanted whole
  int depth_ = 0;            // of the value
  bool in_string_ = false, escaped_ = false, quoted_ = false;  // quoted_: the value is a string
  bool has_name_ = false;
  std::string name_, arguments_;
};

}  // namespace basin::text
