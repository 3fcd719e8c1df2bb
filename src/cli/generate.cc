// basin generate: text (or ids) as it is chosen, or one JSON object at the end.
#include <fmt/format.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "basin/base/error.h"
#include "cli/answer.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/inputs.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "engine/tasks.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace basin::cli {
namespace {

text::ChatOptions chat_options(const GenerateArgs& args) {
  text::ChatOptions options;
  options.default_system = !args.system;
  options.thinking = args.thinking;
  return options;
}

std::vector<std::int32_t> chat_ids(const text::ChatFormat& format, const GenerateArgs& args,
                                   const std::string& prompt) {
  std::vector<text::Message> messages;
  if (args.system && !args.system->empty()) messages.push_back({"system", *args.system});
  messages.push_back({"user", prompt});
  return format.render(messages, chat_options(args));
}

// Prints each token at once: text cut at UTF-8 boundaries, or ids when the model has no tokenizer. Thoughts go to a
// terminal only, beside the answer.
class Printer {
 public:
  explicit Printer(std::optional<AnswerReader> answer) : answer_(std::move(answer)) {}

  void token(std::int32_t id) {
    if (answer_) {
      print(answer_->push(id));
    } else {
      write(first_ ? fmt::format("{}", id) : fmt::format(" {}", id));
    }
    first_ = false;
  }
  void end() {
    if (answer_) print(answer_->finish());
    write("\n");
  }

 private:
  void print(const Answer& piece) {
    if (isatty(STDERR_FILENO) == 1) {
      print_thought(piece.thought);
      thinking_ = thinking_ || !piece.thought.empty();
      if (!piece.said.empty() && std::exchange(thinking_, false)) print_thought("\n\n");
    }
    write(piece.said);
  }
  static void write(std::string_view text) {
    if (!text.empty()) write_answer(text);
  }

  std::optional<AnswerReader> answer_;  // nothing without a tokenizer
  bool first_ = true, thinking_ = false;
};

// Without a window a text ends with the context, however many tokens were asked for: nothing else would tell.
void print_early_end(const engine::Generated& generated, std::int64_t max_tokens,
                     const models::ModelConfig& config) {
  const auto new_tokens = static_cast<std::int64_t>(generated.token_ids.size());
  if (generated.finish_reason != engine::FinishReason::length || new_tokens >= max_tokens) return;
  print_note(
      fmt::format("note: the model's context of {} tokens is full after {} of {} new tokens; {} goes on",
                  config.context, new_tokens, max_tokens, streaming_flags(config)));
}

void print_speed(const engine::Generated& generated) {
  if (isatty(STDERR_FILENO) != 1) return;
  const auto new_tokens = static_cast<double>(generated.token_ids.size());
  print_note(fmt::format("[{} prompt tokens in {:.2f} s, {} new tokens at {:.1f}/s, {}]",
                         generated.prompt_tokens, generated.prefill_seconds, generated.token_ids.size(),
                         generated.decode_seconds > 0.0 ? new_tokens / generated.decode_seconds : 0.0,
                         engine::name(generated.finish_reason)));
}

}  // namespace

int run(const GenerateArgs& args) {
  std::string prompt;
  std::vector<std::int32_t> ids;
  if (args.prompt) prompt = *args.prompt;
  if (args.prompt_file) prompt = read_text(*args.prompt_file);
  if (args.tokens_file) ids = read_tokens(*args.tokens_file);

  Session session(args.model);
  std::unique_ptr<text::ChatFormat> format;
  if (args.chat) {
    format = text::find_chat_format(session.tokenizer(false), session.loaded.chat_template,
                                    session.config().architecture);
    ids = chat_ids(*format, args, prompt);
  } else if (!args.tokens_file) {
    ids = encode_for_model(session.tokenizer(true), prompt).ids;
  }
  check_vocabulary(ids, session.config(), "the prompt");
  check_fits(static_cast<std::int64_t>(ids.size()), session.config(), args.model.stream, "the prompt",
             "shorten it");

  const text::Tokenizer* const tokenizer = session.loaded.tokenizer.get();
  engine::GenerateOptions options;
  options.max_tokens = args.max_tokens;
  options.sampling = args.sampling;
  if (tokenizer != nullptr && !args.ignore_eos)
    options.stops.assign(tokenizer->stops().begin(), tokenizer->stops().end());

  const auto reader = [&]() -> std::optional<AnswerReader> {
    if (tokenizer == nullptr) return {};
    return AnswerReader(format ? format->parser(chat_options(args)) : text::make_plain_parser(*tokenizer));
  };
  engine::Stream stream(*session.loaded.model, args.model.stream, session.pool);
  Printer printer(reader());
  std::function<void(std::int32_t)> on_token;
  if (!args.json) on_token = [&](std::int32_t id) { printer.token(id); };
  Progress progress("reading the prompt");
  const auto on_prefill = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const engine::Generated generated =
      engine::generate(stream, ids, options, on_token, on_prefill, interrupt_flag());

  if (args.json) {
    const engine::StreamReport report = stream.report();
    nlohmann::ordered_json object;
    const Answer answer = tokenizer != nullptr ? read_answer(*reader(), generated.token_ids) : Answer();
    object["text"] = answer.said;
    if (!answer.thought.empty()) object["reasoning"] = answer.thought;
    object["token_ids"] = generated.token_ids;
    object["prompt_tokens"] = generated.prompt_tokens;
    object["completion_tokens"] = generated.token_ids.size();
    object["finish_reason"] = engine::name(generated.finish_reason);
    object["kept_tokens_max"] = report.kept_tokens_max;
    object["kv_bytes_max"] = report.kv_bytes_max;
    object["seconds"] = generated.prefill_seconds + generated.decode_seconds;
    object["compute"] = name(args.model.stream.compute);
    write_json(object);
  } else {
    printer.end();
    print_speed(generated);
  }
  print_early_end(generated, args.max_tokens, session.config());
  return generated.finish_reason == engine::FinishReason::cancelled ? interrupted_exit_code() : 0;
}

}  // namespace basin::cli
