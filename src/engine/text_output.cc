#include "engine/text_output.h"

#include <algorithm>

namespace basin::engine {

std::string TextOutput::search(const std::string& text) {
  if (stop_ != nullptr) return {};
  held_ += text;
  std::size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    const std::size_t at = held_.find(stop);
    // Of two that begin at one place the longer is no other text before it; the first given counts.
    if (at < first) {
      first = at;
      stop_ = &stop;
    }
  }
  if (stop_ != nullptr) {
    std::string shown = held_.substr(0, include_stop_ ? first + stop_->size() : first);
    held_.clear();
    return shown;
  }
  std::size_t hold = 0;  // the longest end of the text that begins a stop string
  for (const std::string& stop : stops_) {
    for (std::size_t size = std::min(stop.size() - 1, held_.size()); size > hold; --size) {
      if (held_.ends_with(std::string_view(stop).substr(0, size))) hold = size;
    }
  }
  std::string shown = held_.substr(0, held_.size() - hold);
  held_.erase(0, shown.size());
  return shown;
}

std::string TextOutput::finish() {
  std::string shown = search(utf8_.finish());
  shown += held_;
  held_.clear();
  return shown;
}

}  // namespace basin::engine
