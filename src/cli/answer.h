// What a model says, out of the tokens that it generates.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text/chat.h"

namespace basin::cli {

struct Answer {
  std::string said, thought;
};

/// Whole characters as they come. Calls of tools cannot occur, since the program offers none.
class AnswerReader {
 public:
  explicit AnswerReader(std::unique_ptr<text::ChatParser> parser) : parser_(std::move(parser)) {}

  Answer push(std::int32_t id) { return join(parser_->push(id)); }
  Answer finish() { return join(parser_->finish()); }

 private:
  static Answer join(const std::vector<text::ChatDelta>& deltas);
  std::unique_ptr<text::ChatParser> parser_;
};

Answer read_answer(AnswerReader reader, const std::vector<std::int32_t>& ids);

}  // namespace basin::cli
