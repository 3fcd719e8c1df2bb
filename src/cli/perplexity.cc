// basin perplexity: how well a model predicts a text, and how that changes along it.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/inputs.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "engine/tasks.h"
#include "text/tokenizer.h"

namespace basin::cli {
namespace {

void print_json(const PerplexityArgs& args, const engine::PerplexityResult& result,
                const engine::StreamReport& report) {
  nlohmann::ordered_json object;
  object["tokens"] = result.tokens;
  object["scored_tokens"] = result.scored_tokens;
  object["bos"] = result.bos;
  object["perplexity"] = result.perplexity;
  object["mean_nll"] = result.mean_nll;
  object["curve"] = nlohmann::ordered_json::array();
  for (const engine::CurvePoint& point : result.curve) {
    object["curve"].push_back({point.tokens_seen, point.mean_nll});
  }
  object["kept_tokens_max"] = report.kept_tokens_max;
  object["kv_bytes_max"] = report.kv_bytes_max;
  object["seconds"] = result.seconds;
  object["compute"] = name(args.model.stream.compute);
  write_json(object);
}

void print_text(const PerplexityArgs& args, const engine::PerplexityResult& result,
                const engine::StreamReport& report) {
  const double rate = result.seconds > 0.0 ? static_cast<double>(result.tokens) / result.seconds : 0.0;
  std::string text;
  text += fmt::format("tokens       {} ({} scored, BOS {})\n", result.tokens, result.scored_tokens,
                      result.bos ? "added" : "not added");
  text += fmt::format("visible      {}\n", describe_visible(args.model.stream));
  text += fmt::format("perplexity   {:.4f}\n", result.perplexity);
  text += fmt::format("mean NLL     {:.5f} nats\n", result.mean_nll);
  text += fmt::format("kept tokens  {} at most\n", report.kept_tokens_max);
  text += fmt::format("KV memory    {} at most\n", human_bytes(static_cast<double>(report.kv_bytes_max)));
  text += fmt::format("time         {:.2f} s ({:.0f} tokens/s, {} compute)\n", result.seconds, rate,
                      name(args.model.stream.compute));
  write_stdout(text);
}

}  // namespace

int run(const PerplexityArgs& args) {
  std::string text;
  std::vector<std::int32_t> ids;
  if (args.text_file) text = read_text(*args.text_file);
  if (args.tokens_file) ids = read_tokens(*args.tokens_file);

  Session session(args.model);
  std::optional<std::int32_t> bos;
  if (args.text_file) {
    const text::Tokenizer& tokenizer = session.tokenizer(true);
    ids = tokenizer.encode(text, true);
    if (tokenizer.adds_bos()) bos = tokenizer.bos();
  }
  if (args.max_tokens && *args.max_tokens < static_cast<std::int64_t>(ids.size())) {
    ids.resize(static_cast<std::size_t>(*args.max_tokens));
  }
  check_vocabulary(ids, session.config(), "the text");
  check_fits(static_cast<std::int64_t>(ids.size()), session.config(), args.model.stream, "the text",
             fmt::format("read only its beginning with --max-tokens {}", session.config().context));

  engine::Stream stream(*session.loaded.model, args.model.stream, session.pool);
  Progress progress("reading");
  const auto on_progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const engine::PerplexityResult result =
      engine::perplexity(stream, ids, bos ? &*bos : nullptr, on_progress, interrupt_flag());
  if (args.json) {
    print_json(args, result, stream.report());
  } else {
    print_text(args, result, stream.report());
  }
  return 0;
}

}  // namespace basin::cli
