// basin logits: every token's logits, for comparison with other implementations.
#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/inputs.h"
#include "cli/interrupt.h"
#include "cli/logits_file.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "engine/stream.h"

namespace basin::cli {

int run(const LogitsArgs& args) {
  const std::vector<std::int32_t> ids = read_tokens(args.tokens_file);
  const auto tokens = static_cast<std::int64_t>(ids.size());
  LogitsFile file(args.out);
  Session session(args.model);
  const std::int64_t vocabulary = session.config().vocabulary;
  check_vocabulary(ids, session.config(), args.tokens_file);
  check_fits(tokens, session.config(), args.model.stream, args.tokens_file, {});

  const auto start = std::chrono::steady_clock::now();
  engine::Stream stream(*session.loaded.model, args.model.stream, session.pool);
  Progress progress("logits");
  file.begin(tokens, vocabulary);
  stream.feed(ids, models::LogitsRows::all,
              [&](std::int64_t first, std::int64_t rows, std::span<const float> logits) {
                throw_if_interrupted();
                file.append(logits);
                progress.update(first + rows, tokens);
                return true;
              });
  throw_if_interrupted();
  file.finish();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const engine::StreamReport report = stream.report();
  if (args.json) {
    nlohmann::ordered_json object;
    object["out"] = args.out;
    object["tokens"] = tokens;
    object["vocabulary"] = vocabulary;
    object["kept_tokens_max"] = report.kept_tokens_max;
    object["kv_bytes_max"] = report.kv_bytes_max;
    object["seconds"] = seconds;
    object["compute"] = name(args.model.stream.compute);
    write_json(object);
  } else {
    write_stdout(fmt::format("{}: logits float32 [{}, {}], {} compute, {:.2f} s\n", one_line(args.out),
                             tokens, vocabulary, name(args.model.stream.compute), seconds));
  }
  return 0;
}

}  // namespace basin::cli
