// basin probe: where a model's attention goes on a text, or what recorded selections have in common.
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/inputs.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "engine/tasks.h"
#include "ops/rope.h"
#include "probe/npz.h"
#include "probe/report.h"
#include "probe/run.h"
#include "probe/summary.h"
#include "text/tokenizer.h"

namespace basin::cli {
namespace {

namespace fs = std::filesystem;

std::vector<std::int32_t> read_input(const ProbeArgs& args, const Session& session) {
  std::vector<std::int32_t> ids;
  if (args.tokens_file) ids = read_tokens(*args.tokens_file);
  if (args.text_file) ids = encode_for_model(session.tokenizer(true), read_text(*args.text_file)).ids;
  if (args.max_tokens && *args.max_tokens < static_cast<std::int64_t>(ids.size())) {
    ids.resize(static_cast<std::size_t>(*args.max_tokens));
  }
  check_vocabulary(ids, session.config(), "the text");
  if (!args.allow_beyond_context) {
    check_fits(static_cast<std::int64_t>(ids.size()), session.config(), args.model.stream, "the text",
               fmt::format("look only at its beginning with --max-tokens {}, or add --allow-beyond-context",
                           session.config().context));
  }
  return ids;
}

// The text of each token, for the page.
std::vector<std::string> labels(const Session& session, const std::vector<std::int32_t>& ids) {
  std::vector<std::string> texts;
  if (!session.loaded.tokenizer) return texts;
  for (const std::int32_t id : ids) texts.push_back(session.loaded.tokenizer->decode({&id, 1}, true));
  return texts;
}

// The recorded sets of every layer, in the form that --trace reads.
void write_trace(const fs::path& layers, const models::ModelConfig& config,
                 const std::vector<std::int32_t>& ids, const fs::path& path) {
  const auto count = static_cast<std::int64_t>(config.layers.size());
  probe::NpzWriter file(path);
  for (std::int64_t layer = 0; layer < count; ++layer) {
    const fs::path from = probe::layer_file(layers, layer);
    if (probe::read_layer(from).profile.window > 0)
      continue;  // a local layer selects nothing: it sees its window
    const probe::NpzFile found(from);
    file.copy(fmt::format("topk/layer_{}", layer), found, "topk");
    file.copy(fmt::format("mass/layer_{}", layer), found, "topk_mass");
  }
  std::vector<std::int32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), 0);
  const std::int64_t shape[] = {static_cast<std::int64_t>(ids.size())};
  file.add("q_pos", shape, positions);
  file.add("tokens", shape, ids);
  const ops::Rope rope(config.rope, config.rope_layout);
  const std::int64_t pairs[] = {std::ssize(rope.frequencies())};
  file.add("rope", DType::f64, pairs, rope.frequencies().data());
  file.finish();
}

// What the model loses on this text with the advised pair, with less, and without the sink tokens.
void measure(const ProbeArgs& args, Session& session, const std::vector<std::int32_t>& ids,
             probe::Advice& advice) {
  if (!args.advise || advice.chosen.empty() || ids.size() < 2) return;
  const bool whole_fits = static_cast<std::int64_t>(ids.size()) <= session.config().context;
  const probe::Pair chosen = advice.chosen[0].pair;
  std::vector<probe::Pair> pairs;
  if (whole_fits) pairs.push_back({0, 0});
  std::vector<std::int64_t> windows = {chosen.window};
  if (chosen.window / 4 >= probe::windows(1).front())
    windows.push_back(chosen.window / 4);  // has a prediction
  for (const std::int64_t window : windows) {
    for (const std::int64_t sinks : {chosen.sink_tokens, std::int64_t{0}}) {
      if (pairs.empty() || pairs.back().window != window || pairs.back().sink_tokens != sinks)
        pairs.push_back({sinks, window});
    }
  }
  for (const probe::Pair& pair : pairs) {
    engine::StreamOptions options = args.model.stream;
    options.sink_tokens = pair.sink_tokens;
    options.window = pair.window > 0 ? std::optional(pair.window) : std::nullopt;
    // The probe saw keys where they stood, so that is what is measured where the model knows those distances.
    options.positions = whole_fits ? engine::PositionMode::absolute : engine::PositionMode::in_cache;
    if (pair.window > 0 && !whole_fits && pair.sink_tokens + pair.window > session.config().context) continue;
    engine::Stream stream(*session.loaded.model, options, session.pool);
    Progress progress(pair.window == 0 ? "scoring, all tokens"
                                       : fmt::format("scoring, {} + {}", pair.sink_tokens, pair.window));
    const engine::PerplexityResult result = engine::perplexity(
        stream, ids, nullptr, [&](std::int64_t done, std::int64_t total) { progress.update(done, total); },
        interrupt_flag());
    advice.measured.push_back({describe_visible(options), pair, result.mean_nll, result.perplexity});
  }
}

int study_trace(const ProbeArgs& args, const fs::path& path, const std::string& source,
                const probe::TraceShape& shape, ThreadPool& pool);

void say_without_pictures(const probe::Written& written) {
  if (!written.no_pictures.empty()) print_note(fmt::format("figures are SVG only: {}", written.no_pictures));
}

int probe_model(const ProbeArgs& args) {
  Session session(args.model);
  const std::vector<std::int32_t> ids = read_input(args, session);
  const std::optional<models::IndexerConfig>& indexer = session.config().indexer;
  if (indexer && args.topk > 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--topk {}: this model selects {} keys by itself", args.topk, indexer->topk),
                "leave --topk out");
  }
  if (indexer && args.model.stream.window) {
    throw Error(ErrorCode::invalid_argument,
                "--window: selections are recorded of queries that may select among all keys",
                "leave --window out");
  }
  const engine::StreamOptions& stream = args.model.stream;
  const fs::path out = args.out;
  probe::RunOptions options;
  options.policy = {stream.sink_tokens, stream.window.value_or(0),
                    stream.positions == engine::PositionMode::in_cache};
  options.page_tokens = stream.page_tokens;
  options.compute = stream.compute;
  options.layer.map_bins = args.map_bins;
  options.layer.topk = args.topk;
  options.index = stream.index;
  options.model = fs::path(args.model.model).filename().string();
  options.folder = out / "layers";
  const auto layers = static_cast<std::int64_t>(session.config().layers.size());
  {
    Progress progress("probing");
    const std::int64_t before = probe::run(
        *session.loaded.model, ids, options, session.pool,
        [&](std::int64_t done, std::int64_t total) { progress.update(done, total); }, interrupt_flag());
    if (before > 0)
      print_note(fmt::format("went on after {} of {} layers, which were there", before, layers));
  }
  if (indexer) {
    const fs::path trace = out / "trace.npz";
    write_trace(options.folder, session.config(), ids, trace);
    const int code = study_trace(args, trace, options.model, {}, session.pool);
    std::error_code ignored;
    fs::remove_all(options.folder, ignored);  // all of it stands in trace.npz now
    return code;
  }
  probe::ModelSummary summary = probe::summarise(options.folder, layers);
  summary.model = fs::path(options.model).extension() == ".gguf" ? fs::path(options.model).stem().string()
                                                                 : options.model;
  summary.reading = describe_visible(stream);
  summary.context = session.config().context;
  probe::Advice advice = probe::advise(summary, args.target);
  if (stream.window) advice = {};  // nothing to advise where a window is set already
  measure(args, session, ids, advice);
  const probe::Written written =
      probe::write_model_report(out, summary, advice, labels(session, ids), session.pool);
  say_without_pictures(written);
  probe::write_data(options.folder, layers, out / "data.npz");
  if (args.topk > 0) write_trace(options.folder, session.config(), ids, out / "trace.npz");
  std::error_code ignored;
  fs::remove_all(options.folder, ignored);  // all of it stands in data.npz now

  if (args.json) {
    nlohmann::ordered_json object;
    object["out"] = args.out;
    object["tokens"] = ids.size();
    object["layers"] = layers;
    if (!advice.chosen.empty()) {
      object["sink_tokens"] = advice.chosen[0].pair.sink_tokens;
      object["window"] = advice.chosen[0].pair.window;
      object["retained"] = advice.chosen[0].retained;
    }
    write_json(object);
    return 0;
  }
  std::string text;
  for (const std::string& line : written.lines) text += line + "\n";
  write_stdout(text + fmt::format("Report: {}\n", (out / "report.html").string()));
  return 0;
}

int study_trace(const ProbeArgs& args, const fs::path& path, const std::string& source,
                const probe::TraceShape& shape, ThreadPool& pool) {
  const probe::Trace trace = probe::open_trace(path, shape);
  probe::StudyOptions options;
  options.first = args.from_query;
  options.last = args.to_query;
  Progress progress("studying");
  const probe::Study study = probe::study(
      trace, options, pool, [&](std::int64_t done, std::int64_t total) { progress.update(done, total); },
      interrupt_flag());
  const probe::Written written =
      probe::write_trace_report(args.out, study, probe::null_models(study, pool), source, pool);
  say_without_pictures(written);
  if (args.json) {
    nlohmann::ordered_json object;
    object["out"] = args.out;
    object["layers"] = study.layers.size();
    object["topk"] = study.topk;
    object["first_position"] = study.first;
    object["queries"] = study.queries;
    write_json(object);
    return 0;
  }
  std::string text;
  for (const std::string& line : written.lines) text += line + "\n";
  write_stdout(text + fmt::format("Report: {}\n", (fs::path(args.out) / "report.html").string()));
  return 0;
}

int probe_trace(const ProbeArgs& args) {
  ThreadPool pool(0);
  const fs::path path = *args.trace_file;
  return study_trace(args, path, path.filename().string(), {args.layers, args.topk}, pool);
}

}  // namespace

int run(const ProbeArgs& args) {
  return args.trace_file ? probe_trace(args) : probe_model(args);
}

}  // namespace basin::cli
