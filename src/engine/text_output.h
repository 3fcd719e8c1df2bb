// From the bytes of tokens to text that may be shown: whole UTF-8 characters, up to the first stop string.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace basin::engine {

class TextOutput {
 public:
  /// No stop string is empty.
  TextOutput(std::vector<std::string> stops, bool include_stop)
      : stops_(std::move(stops)), include_stop_(include_stop) {}

  /// What can be shown now. Of two stop strings the one that begins first counts. Bytes after a stop string are lost.
  std::string push(std::string_view bytes) { return search(utf8_.push(bytes)); }
  /// What was held back because a stop string or a character could have gone on.
  std::string finish();

  /// The stop string that was found, or null.
  const std::string* stop() const { return stop_; }

 private:
  std::string search(const std::string& text);

  std::vector<std::string> stops_;
  bool include_stop_;
  text::Utf8Stream utf8_;
  std::string held_;
  const std::string* stop_ = nullptr;  // one of stops_
};

}  // namespace basin::engine
