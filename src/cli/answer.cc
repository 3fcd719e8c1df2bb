#include "cli/answer.h"

namespace basin::cli {

Answer AnswerReader::join(const std::vector<text::ChatDelta>& deltas) {
  Answer answer;
  for (const text::ChatDelta& delta : deltas)
    (delta.kind == text::ChatDelta::reasoning ? answer.thought : answer.said) += delta.text;
  return answer;
}

Answer read_answer(AnswerReader reader, const std::vector<std::int32_t>& ids) {
  Answer whole;
  const auto add = [&](const Answer& piece) {
    whole.said += piece.said;
    whole.thought += piece.thought;
  };
  for (const std::int32_t id : ids) add(reader.push(id));
  add(reader.finish());
  return whole;
}

}  // namespace basin::cli
