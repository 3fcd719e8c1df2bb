// basin bench: prefill and decode speed, beside what this machine can reach at most.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "basin/base/cpu_target.h"
#include "basin/base/error.h"
#include "cli/ceilings.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/cost.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "engine/stream.h"

namespace basin::cli {
namespace {

constexpr std::int64_t kPrefillTokens = 512;
constexpr std::int64_t kDecodeTokens = 64;
constexpr double kLeastSeconds = 1.0;  // of each measurement, repeated until then; the best repeat counts
constexpr int kLeastRepeats = 3;

struct Speed {
  std::int64_t tokens = 0;
  std::int64_t depth = 0;  // tokens before them
  double seconds = 0.0;    // of the best repeat
  double flops = 0.0;      // per second
  double bytes = 0.0;      // per second; decode only

  double tokens_per_second() const { return static_cast<double>(tokens) / seconds; }
};

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Any ids do: the time of a pass does not depend on them.
std::vector<std::int32_t> some_tokens(std::int64_t count, std::int64_t vocabulary) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::int64_t id = 1;
  for (std::int32_t& slot : ids) {
    id = id * 48271 % 2147483647;
    slot = static_cast<std::int32_t>(id % vocabulary);
  }
  return ids;
}

void feed(engine::Stream& stream, std::span<const std::int32_t> tokens) {
  stream.feed(tokens, models::LogitsRows::last, [](std::int64_t, std::int64_t, std::span<const float>) {
    throw_if_interrupted();
    return true;
  });
  throw_if_interrupted();
}

// The most tokens that fit without a window.
std::int64_t fit(std::int64_t tokens, const Session& session, const engine::StreamOptions& options) {
  return options.window ? tokens : std::min(tokens, session.config().context);
}

Speed measure_prefill(Session& session, const engine::StreamOptions& options) {
  Speed speed;
  speed.tokens = fit(kPrefillTokens, session, options);
  const std::vector<std::int32_t> ids = some_tokens(speed.tokens, session.config().vocabulary);
  const Stopwatch total;
  for (int repeat = 0; repeat < kLeastRepeats || total.seconds() < kLeastSeconds; ++repeat) {
    engine::Stream stream(*session.loaded.model, options, session.pool);
    const Stopwatch watch;
    feed(stream, ids);
    speed.seconds = repeat == 0 ? watch.seconds() : std::min(speed.seconds, watch.seconds());
  }
  speed.flops = pass_flops(session.config(), options, 0, speed.tokens, 1) / speed.seconds;
  return speed;
}

Speed measure_decode(Session& session, const engine::StreamOptions& options, std::int64_t depth_tokens) {
  const std::int64_t total_tokens = fit(depth_tokens + kDecodeTokens, session, options);
  const std::int64_t prompt =
      std::min(depth_tokens, std::max(total_tokens / 2, total_tokens - kDecodeTokens));
  if (prompt == 0) {
    throw Error(ErrorCode::unsupported, "a context of one token leaves nothing to decode", "give --window M");
  }
  Speed speed;
  speed.tokens = total_tokens - prompt;
  speed.depth = prompt;
  const std::vector<std::int32_t> ids = some_tokens(total_tokens, session.config().vocabulary);
  const std::span<const std::int32_t> all(ids);
  const Stopwatch total;
  engine::StreamReport report;
  for (int repeat = 0; repeat < kLeastRepeats || total.seconds() < kLeastSeconds; ++repeat) {
    engine::Stream stream(*session.loaded.model, options, session.pool);
    feed(stream, all.first(static_cast<std::size_t>(prompt)));
    const Stopwatch watch;
    for (std::int64_t t = prompt; t < total_tokens; ++t)
      feed(stream, all.subspan(static_cast<std::size_t>(t), 1));
    speed.seconds = repeat == 0 ? watch.seconds() : std::min(speed.seconds, watch.seconds());
    report = stream.report();
  }
  const auto passes = static_cast<double>(speed.tokens);
  speed.flops = pass_flops(session.config(), options, prompt, speed.tokens, speed.tokens) / speed.seconds;
  // Weights once per token, and the keys and values, which grow from the prompt to the end.
  const double kv_bytes = static_cast<double>(report.kv_bytes_max) *
                          static_cast<double>(prompt + total_tokens) /
                          (2.0 * static_cast<double>(total_tokens));
  speed.bytes =
      passes * (static_cast<double>(session.loaded.model->token_weight_bytes()) + kv_bytes) / speed.seconds;
  return speed;
}

nlohmann::ordered_json percent(double value, std::optional<double> ceiling) {
  if (!ceiling) return nullptr;
  return 100.0 * value / *ceiling;
}

nlohmann::ordered_json giga(std::optional<double> value) {
  if (!value) return nullptr;
  return *value / 1e9;
}

void print_json(const BenchArgs& args, Session& session, const Ceilings& ceilings, const Speed& prefill,
                const Speed& decode) {
  nlohmann::ordered_json object;
  object["model"] = args.model.model;
  object["compute"] = name(args.model.stream.compute);
  object["cpu_target"] = name(cpu_target());
  object["threads"] = session.pool.threads();
  object["ceilings"] = {{"read_gb_per_s", ceilings.read_bytes_per_second / 1e9},
                        {"fp32_fma_gflop_per_s", ceilings.fp32_flops / 1e9},
                        {"bf16_dot_gflop_per_s", giga(ceilings.bf16_flops)},
                        {"int8_dot_gop_per_s", giga(ceilings.int8_ops)}};
  object["prefill"] = {{"tokens", prefill.tokens},
                       {"chunk_tokens", args.model.stream.chunk_tokens},
                       {"seconds", prefill.seconds},
                       {"tokens_per_s", prefill.tokens_per_second()},
                       {"gflop_per_s", prefill.flops / 1e9},
                       {"percent_of_fp32_fma", percent(prefill.flops, ceilings.fp32_flops)},
                       {"percent_of_bf16_dot", percent(prefill.flops, ceilings.bf16_flops)},
                       {"percent_of_int8_dot", percent(prefill.flops, ceilings.int8_ops)}};
  object["decode"] = {{"depth", decode.depth},
                      {"tokens", decode.tokens},
                      {"seconds", decode.seconds},
                      {"tokens_per_s", decode.tokens_per_second()},
                      {"gflop_per_s", decode.flops / 1e9},
                      {"gb_per_s", decode.bytes / 1e9},
                      {"percent_of_read", percent(decode.bytes, ceilings.read_bytes_per_second)}};
  write_json(object);
}

std::string peak_line(std::string_view label, std::optional<double> peak, std::string_view unit) {
  if (!peak) return fmt::format("  {}        -  (this CPU target has no such instruction)\n", label);
  return fmt::format("  {} {:8.1f} {}\n", label, *peak / 1e9, unit);
}

std::string share(std::string_view label, double value, std::optional<double> ceiling) {
  return ceiling ? fmt::format(", {:.1f}% of {}", 100.0 * value / *ceiling, label) : std::string();
}

void print_text(const BenchArgs& args, Session& session, const Ceilings& ceilings, const Speed& prefill,
                const Speed& decode) {
  std::string text =
      fmt::format("ceilings of this machine ({}, {} threads)\n", name(cpu_target()), session.pool.threads());
  text += peak_line("memory read", ceilings.read_bytes_per_second, "GB/s");
  text += peak_line("fp32 FMA   ", ceilings.fp32_flops, "GFLOP/s");
  text += peak_line("bf16 dot   ", ceilings.bf16_flops, "GFLOP/s");
  text += peak_line("int8 dot   ", ceilings.int8_ops, "GOP/s");
  text += fmt::format("prefill, {} tokens in chunks of {}, {} compute\n", prefill.tokens,
                      args.model.stream.chunk_tokens, name(args.model.stream.compute));
  text += fmt::format("  {:.1f} tokens/s, {:.1f} GFLOP/s{}{}{}\n", prefill.tokens_per_second(),
                      prefill.flops / 1e9, share("fp32 FMA", prefill.flops, ceilings.fp32_flops),
                      share("bf16 dot", prefill.flops, ceilings.bf16_flops),
                      share("int8 dot", prefill.flops, ceilings.int8_ops));
  text += fmt::format("decode, {} tokens after {}\n", decode.tokens, decode.depth);
  text += fmt::format("  {:.1f} tokens/s, {:.1f} GB/s{}, {:.1f} GFLOP/s\n", decode.tokens_per_second(),
                      decode.bytes / 1e9, share("memory read", decode.bytes, ceilings.read_bytes_per_second),
                      decode.flops / 1e9);
  write_stdout(text);
}

}  // namespace

int run(const BenchArgs& args) {
  Session session(args.model);
  print_note("measuring this machine's ceilings");
  const Ceilings ceilings = measure_ceilings(session.pool);
  print_note("measuring prefill and decode");
  const Speed prefill = measure_prefill(session, args.model.stream);
  const Speed decode = measure_decode(session, args.model.stream, args.depth_tokens);
  if (args.json) {
    print_json(args, session, ceilings, prefill, decode);
  } else {
    print_text(args, session, ceilings, prefill, decode);
  }
  return 0;
}

}  // namespace basin::cli
