// What is asked of the serving engine, and what it tells while it answers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "basin/base/error.h"
#include "engine/scheduler.h"
#include "engine/tasks.h"
#include "kv/cache.h"
#include "ops/sampling.h"

namespace basin::engine {

struct SamplingRequest {
  ops::SamplingOptions
      options;  // its repetition penalty counts the prompt; the two below count what was chosen
  double presence_penalty = 0.0;   // subtracted from the logit of every token chosen so far
  double frequency_penalty = 0.0;  // subtracted once for each time that it was chosen
  std::vector<std::pair<std::int32_t, double>> logit_bias;  // added before everything else
};

/// Throws Error(invalid_argument) naming the option, the value and what is allowed.
void check(const SamplingRequest& sampling, std::int64_t vocabulary);

/// Natural logarithms under the model's own distribution: no bias, penalty or temperature.
struct TokenLogprob {
  std::int32_t id = 0;
  double logprob = 0.0;
  std::vector<std::pair<std::int32_t, double>> top;  // the likeliest, falling
};

struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t completion_tokens = 0;  // without a stop token
  std::int64_t cached_tokens = 0;      // of the prompt, found in the prefix cache
  std::int64_t kept_tokens = 0;        // most rows visible to one query
  std::int64_t preemptions = 0;
};

struct Times {  // microseconds since the request arrived
  std::int64_t started_us = 0, first_token_us = 0, finished_us = 0;
};

struct Failure {
  ErrorCode code = ErrorCode::internal;
  std::string message;
};

/// One step of one choice. Exactly one event of a choice has a finish reason or a failure: its last.
struct Event {
  std::int64_t choice = 0;
  std::string text;                     // whole UTF-8 characters; what may begin a stop string is held back
  std::optional<std::int32_t> token;    // chosen in this step; stop tokens are not among them
  std::optional<TokenLogprob> logprob;  // of `token`, if asked for
  std::vector<TokenLogprob>
      prompt_logprobs;  // of prompt tokens 1, 2, ...; with the first event, if asked for
  std::optional<FinishReason> finish_reason;
  std::optional<std::string> stop_string;  // that ended it
  std::optional<std::int32_t> stop_token;  // likewise
  std::optional<Failure> failure;
  Usage usage;
  Times times;
};

/// Each choice has its own copy of the prompt, so what may wait is counted in tokens, too.
inline constexpr std::int64_t kMostWaitingTokens = 1 << 24;

struct Request {
  std::vector<std::int32_t> prompt;  // not empty
  std::int64_t choices = 1;          // answers to the one prompt; choice i samples with seed + i
  std::int64_t max_tokens = 16;      // 0: the prompt is read and nothing chosen
  SamplingRequest sampling;
  std::optional<std::int64_t> logprobs, prompt_logprobs;  // alternatives of each token, 0 or more
  std::vector<std::string> stops;  // end the text, and are not part of it unless include_stop
  std::vector<std::int32_t> stop_ids;
  bool include_stop = false;
  bool ignore_eos = false;    // the tokenizer's own stop tokens are tokens like others
  bool show_special = false;  // special tokens appear in the text by name
  kv::Policy policy;
  std::int64_t priority = 0;  // higher goes first
  std::optional<std::int64_t> timeout_us;
  /// Of the prompts of all choices.
  std::int64_t waiting_tokens() const { return choices * static_cast<std::int64_t>(prompt.size()); }
  /// Called on the engine's thread, once for each step of each choice. Must be quick, and must not throw.
  std::function<void(Event&&)> on_event;
};

}  // namespace basin::engine
