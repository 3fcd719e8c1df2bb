#include "engine/tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "basin/base/error.h"
#include "ops/elementwise.h"

namespace basin::engine {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool cancelled(const std::atomic<bool>* cancel) {
  return cancel != nullptr && cancel->load(std::memory_order_relaxed);
}

constexpr std::int64_t kCurveTokens = 512;

double mean(std::span<const float> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// One point per kCurveTokens scored tokens, and one at the end.
std::vector<CurvePoint> make_curve(std::span<const float> nll) {
  std::vector<CurvePoint> curve;
  const auto count = static_cast<std::int64_t>(nll.size());
  for (std::int64_t scored = 0; scored < count;) {
    scored = std::min(scored + kCurveTokens, count);
    const std::int64_t size = std::min(kCurveTokens, scored);
    const auto last = nll.subspan(static_cast<std::size_t>(scored - size), static_cast<std::size_t>(size));
    curve.push_back({scored + 1, mean(last)});  // the first token is seen but never scored
  }
  return curve;
}

}  // namespace

const char* name(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
  }
  return "unknown";
}

Generated generate(Stream& stream, std::span<const std::int32_t> prompt, const GenerateOptions& options,
                   const std::function<void(std::int32_t)>& on_token, const OnProgress& on_prefill,
                   const std::atomic<bool>* cancel) {
  ops::check(options.sampling);
  if (prompt.empty())
    throw Error(ErrorCode::invalid_argument, "the prompt has no tokens; generation needs at least one");
  if (options.max_tokens < 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--max-tokens is {}; it must be 0 or more", options.max_tokens));
  }
  Generated result;
  result.prompt_tokens = static_cast<std::int64_t>(prompt.size());
  const std::int64_t before = stream.lengths().logical_position;

  std::vector<float> last;
  const auto keep_last = [&](std::int64_t, std::int64_t rows, std::span<const float> logits) {
    const std::size_t width = logits.size() / static_cast<std::size_t>(rows);
    last.assign(logits.end() - static_cast<std::ptrdiff_t>(width), logits.end());
    return !cancelled(cancel);
  };
  // The prompt is fed in slices so that a cancel is seen in time; a pass has as many tokens at most, whatever the
  // stream's chunks are, which changes no bit.
  const Clock::time_point start = Clock::now();
  stream.check_room(result.prompt_tokens);
  constexpr std::int64_t kSlice = 512;
  for (std::int64_t begin = 0; begin < result.prompt_tokens; begin += kSlice) {
    const std::int64_t size = std::min(kSlice, result.prompt_tokens - begin);
    const bool is_last = begin + size == result.prompt_tokens;
    stream.feed(prompt.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
                is_last ? models::LogitsRows::last : models::LogitsRows::none, keep_last);
    if (on_prefill) on_prefill(stream.lengths().logical_position - before, result.prompt_tokens);
    if (cancelled(cancel)) {
      result.finish_reason = FinishReason::cancelled;
      result.prefill_seconds = seconds_since(start);
      return result;
    }
  }
  result.prefill_seconds = seconds_since(start);

  const Clock::time_point decode_start = Clock::now();
  ops::SeenTokens seen;
  seen.add(stream.token_history());
  while (static_cast<std::int64_t>(result.token_ids.size()) < options.max_tokens) {
    const std::int64_t position = stream.lengths().logical_position;
    const std::int32_t token = ops::sample(last, options.sampling, seen, position);
    if (std::find(options.stops.begin(), options.stops.end(), token) != options.stops.end()) {
      result.finish_reason = FinishReason::stop;
      break;
    }
    result.token_ids.push_back(token);
    seen.add({&token, 1});
    if (on_token) on_token(token);
    if (cancelled(cancel)) {
      result.finish_reason = FinishReason::cancelled;
      break;
    }
    if (static_cast<std::int64_t>(result.token_ids.size()) == options.max_tokens || !stream.has_room(1))
      break;
    stream.feed({&token, 1}, models::LogitsRows::last, keep_last);
  }
  result.decode_seconds = seconds_since(decode_start);
  return result;
}

PerplexityResult perplexity(Stream& stream, std::span<const std::int32_t> text, const std::int32_t* bos,
                            const OnProgress& on_progress, const std::atomic<bool>* cancel) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size() + 1);
  if (bos != nullptr) tokens.push_back(*bos);
  tokens.insert(tokens.end(), text.begin(), text.end());
  if (tokens.size() < 2) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("a text of {} tokens has nothing to score", text.size()),
                "give a text of at least 2 tokens");
  }
  stream.check_ids(tokens);  // the last one is scored but never fed
  PerplexityResult result;
  result.bos = bos != nullptr;
  result.tokens = static_cast<std::int64_t>(text.size());
  result.scored_tokens = static_cast<std::int64_t>(tokens.size()) - 1;

  const Clock::time_point start = Clock::now();
  const std::int64_t before = stream.lengths().logical_position;
  std::vector<double> nll(tokens.size() - 1);
  bool stopped = false;
  // The last token is only scored, never fed.
  const auto fed = std::span<const std::int32_t>(tokens).first(tokens.size() - 1);
  stream.feed(
      fed, models::LogitsRows::all,
      [&](std::int64_t first, std::int64_t rows, std::span<const float> logits) {
        const auto index = static_cast<std::size_t>(first - before);
        ops::negative_log_likelihood(logits.data(), tokens.data() + index + 1, nll.data() + index, rows,
                                     static_cast<std::int64_t>(logits.size()) / rows, stream.pool());
        for (std::size_t i = index; i < index + static_cast<std::size_t>(rows); ++i) {
          if (std::isfinite(nll[i])) continue;
          throw Error(
              ErrorCode::internal,
              fmt::format("the NLL of token {} is {}: the model's logits are not finite", i + 1, nll[i]));
        }
        if (on_progress) on_progress(first - before + rows, result.scored_tokens);
        stopped = cancelled(cancel);
        return !stopped;
      });
  if (stopped) throw Error(ErrorCode::cancelled, "cancelled");

  result.nll.assign(nll.begin(), nll.end());
  result.mean_nll = std::accumulate(nll.begin(), nll.end(), 0.0) / static_cast<double>(nll.size());
  result.perplexity = std::exp(result.mean_nll);
  result.curve = make_curve(result.nll);
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace basin::engine
