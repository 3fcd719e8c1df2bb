// basin generate: text (or ids) as it is chosen, or one JSON object at the end.
#include <fmt/format.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "basin/base/error.h"
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

std::vector<std::int32_t> text_ids(const Session& session, const GenerateArgs& args,
                                   const std::string& prompt) {
  const text::Tokenizer& tokenizer = session.tokenizer();
  if (args.chat) {
    std::vector<text::Message> messages;
    if (args.system && !args.system->empty()) messages.push_back({"system", *args.system});
    messages.push_back({"user", prompt});
    text::ChatOptions options;
    options.default_system = !args.system;
    return text::find_chat_format(tokenizer, session.loaded.chat_template, session.config().architecture)
        ->render(messages, options);
  }
  return encode_for_model(tokenizer, prompt).ids;
}

// The bytes of a generated token. A model may have more ids than its tokenizer (padding of the output matrix); those
// stand for nothing.
std::string bytes_of(const text::Tokenizer& tokenizer, std::int32_t id) {
  return id < tokenizer.vocabulary() ? tokenizer.token_bytes(id, false) : std::string();
}

std::string decode(const text::Tokenizer& tokenizer, const std::vector<std::int32_t>& ids) {
  text::Utf8Stream utf8;
  std::string text;
  for (const std::int32_t id : ids) text += utf8.push(bytes_of(tokenizer, id));
  return text + utf8.finish();
}

// Prints each token at once: text cut at UTF-8 boundaries, or ids when the model has no tokenizer.
class Printer {
 public:
  explicit Printer(const text::Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  void token(std::int32_t id) {
    if (tokenizer_ != nullptr) {
      write(utf8_.push(bytes_of(*tokenizer_, id)));
    } else {
      write(first_ ? fmt::format("{}", id) : fmt::format(" {}", id));
    }
    first_ = false;
  }
  void end() { write(utf8_.finish() + "\n"); }

 private:
  static void write(std::string_view text) {
    if (!text.empty()) write_stdout(text);
  }

  const text::Tokenizer* tokenizer_;  // may be null
  text::Utf8Stream utf8_;
  bool first_ = true;
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
  if (!args.tokens_file) ids = text_ids(session, args, prompt);
  check_vocabulary(ids, session.config(), "the prompt");
  check_fits(static_cast<std::int64_t>(ids.size()), session.config(), args.model.stream, "the prompt",
             "shorten it");

  const text::Tokenizer* const tokenizer = session.loaded.tokenizer.get();
  engine::GenerateOptions options;
  options.max_tokens = args.max_tokens;
  options.sampling = args.sampling;
  if (tokenizer != nullptr) options.stops.assign(tokenizer->stops().begin(), tokenizer->stops().end());

  engine::Stream stream(*session.loaded.model, args.model.stream, session.pool);
  Printer printer(tokenizer);
  std::function<void(std::int32_t)> on_token;
  if (!args.json) on_token = [&](std::int32_t id) { printer.token(id); };
  Progress progress("reading the prompt");
  const auto on_prefill = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const engine::Generated generated =
      engine::generate(stream, ids, options, on_token, on_prefill, interrupt_flag());

  if (args.json) {
    const engine::StreamReport report = stream.report();
    nlohmann::ordered_json object;
    object["text"] = tokenizer != nullptr ? decode(*tokenizer, generated.token_ids) : std::string();
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
