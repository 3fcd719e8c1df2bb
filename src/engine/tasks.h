// What the command line asks of a stream: generate text, measure perplexity.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/stream.h"
#include "ops/sampling.h"

namespace basin::engine {

enum class FinishReason { stop, length, cancelled };
const char* name(FinishReason reason);  // "stop", "length", "cancelled"

struct GenerateOptions {
  std::int64_t max_tokens = 128;
  ops::SamplingOptions sampling;
  std::vector<std::int32_t> stops;  // ids that end the text; not part of the result
};

struct Generated {
  std::vector<std::int32_t> token_ids;  // without the stop token
  std::int64_t prompt_tokens = 0;
  FinishReason finish_reason = FinishReason::length;
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
};

/// Progress of a long read: tokens done so far of the total. May be null.
using OnProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// `prompt` must not be empty. `on_token` (may be null) sees each new token as it is chosen. `cancel` (may be
/// null) is polled between passes. Without a window the text ends with `length` at the trained context.
Generated generate(Stream& stream, std::span<const std::int32_t> prompt, const GenerateOptions& options,
                   const std::function<void(std::int32_t)>& on_token, const OnProgress& on_prefill,
                   const std::atomic<bool>* cancel);

struct CurvePoint {
  std::int64_t tokens_seen = 0;
  double mean_nll = 0.0;  // of the last 512 scored tokens
};

struct PerplexityResult {
  std::int64_t tokens = 0;         // of the text, BOS not counted
  std::int64_t scored_tokens = 0;  // tokens with BOS, tokens - 1 without
  bool bos = false;
  double mean_nll = 0.0;
  double perplexity = 0.0;
  std::vector<CurvePoint> curve;  // one point per 512 scored tokens, and the end
  std::vector<float> nll;         // [scored_tokens], in order
  double seconds = 0.0;
};

/// Teacher-forced. `bos` (when not null) is fed first and never scored. `text` needs 2 tokens, or 1 with BOS.
/// Throws Error(cancelled) when `cancel` turns true.
PerplexityResult perplexity(Stream& stream, std::span<const std::int32_t> text, const std::int32_t* bos,
                            const OnProgress& on_progress, const std::atomic<bool>* cancel);

}  // namespace basin::engine
