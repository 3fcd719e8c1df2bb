#include "engine/stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "basin/base/error.h"
#include "engine/model_runner.h"
#include "models/cache.h"

namespace basin::engine {
namespace {

kv::Policy policy(const StreamOptions& options) {
  kv::Policy policy;
  policy.sink_tokens = options.sink_tokens;
  policy.window = options.window.value_or(0);
  policy.in_cache_positions = options.positions == PositionMode::in_cache;
  return policy;
}

void refuse(const std::string& what, const std::string& hint = {}) {
  throw Error(ErrorCode::invalid_argument, what, hint);
}

// Largest count an option may have: sums of a few of them stay inside int64.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMaxPageTokens = std::int64_t{1} << 20;

void check(const models::IndexOptions& options, const models::ModelConfig& config) {
  if (options == models::IndexOptions{}) return;
  const char* const first = options.fp8                ? "--index-fp8"
                            : options.sink_tokens != 0 ? "--index-sink-tokens"
                                                       : "--index-window";
  if (!config.indexer) {
    refuse(fmt::format("{}: this model has no indexer", first), fmt::format("leave {} out", first));
  }
  const models::IndexerConfig& indexer = *config.indexer;
  if (options.fp8 && !std::has_single_bit(static_cast<std::uint64_t>(indexer.d_head))) {
    refuse(fmt::format(
        "--index-fp8: the Hadamard transform needs a power of two, and the indexer's heads have {}",
        indexer.d_head));
  }
  if (options.sink_tokens < 0 || options.window < 0 || options.sink_tokens > indexer.topk ||
      options.window > indexer.topk - options.sink_tokens) {
    refuse(
        fmt::format("--index-sink-tokens {} and --index-window {} take places of the {} keys that this "
                    "model selects; together they must be at most that",
                    options.sink_tokens, options.window, indexer.topk));
  }
}

}  // namespace

void check(const StreamOptions& options, const models::ModelConfig& config) {
  if (options.sink_tokens < 0 || options.sink_tokens > kMaxTokens) {
    refuse(fmt::format("--sink-tokens is {}; it must be 0 or more", options.sink_tokens));
  }
  if (options.window && (*options.window < 1 || *options.window > kMaxTokens)) {
    refuse(fmt::format("--window is {}; it counts visible recent tokens including self and must be 1 or more",
                       *options.window),
           "leave --window out to see the whole text");
  }
  if (options.sink_tokens > 0 && !options.window) {
    refuse(fmt::format("--sink-tokens {} without --window has no effect", options.sink_tokens),
           "add --window M to keep the last M tokens, or leave --sink-tokens out");
  }
  if (options.chunk_tokens < 1 || options.chunk_tokens > kMaxTokens) {
    refuse(fmt::format("--chunk-tokens is {}; it must be 1 or more", options.chunk_tokens));
  }
  if (options.page_tokens < 1 || options.page_tokens > kMaxPageTokens) {
    refuse(fmt::format("--page-tokens is {}; allowed are 1 to {}", options.page_tokens, kMaxPageTokens));
  }
  check(options.index, config);
  if (options.window && options.positions == PositionMode::in_cache &&
      options.sink_tokens + *options.window > config.context) {
    refuse(fmt::format("{} sink tokens and a window of {} exceed the trained context of {} tokens",
                       options.sink_tokens, *options.window, config.context),
           options.sink_tokens < config.context
               ? fmt::format("use --window {} or less", config.context - options.sink_tokens)
               : fmt::format("use fewer sink tokens than {}; 4 do for most models", config.context));
  }
}

models::PassOptions pass_options(const StreamOptions& options) {
  return {options.compute, options.attention_backend, nullptr, options.index};
}

kv::SequenceCache make_cache(const StreamOptions& options, const models::ModelConfig& config) {
  const kv::Shape shape = models::cache_shape(config, options.compute, options.page_tokens, options.latent);
  return models::make_cache(config, std::make_shared<kv::PagePool>(shape), policy(options));
}

struct Stream::State {
  models::Model& model;
  StreamOptions options;
  ThreadPool& pool;
  kv::SequenceCache cache;
  std::vector<std::int32_t> history;
  attention::Ran ran{"", ""};
};

Stream::Stream(models::Model& model, const StreamOptions& options, ThreadPool& pool) {
  check(options, model.config());
  state_ =
      std::make_unique<State>(State{model, options, pool, make_cache(options, model.config()), {}, {"", ""}});
}

Stream::~Stream() = default;

void Stream::feed(std::span<const std::int32_t> tokens, models::LogitsRows rows, const OnLogits& on_logits) {
  State& s = *state_;
  check_ids(tokens);
  const auto count = static_cast<std::int64_t>(tokens.size());
  check_room(count);
  bool go_on = true;
  for (std::int64_t begin = 0; begin < count && go_on; begin += s.options.chunk_tokens) {
    const std::int64_t size = std::min(s.options.chunk_tokens, count - begin);
    models::Chunk chunk;
    chunk.tokens = tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size));
    chunk.cache = &s.cache;
    chunk.rows = rows;
    if (rows == models::LogitsRows::last && begin + size < count) chunk.rows = models::LogitsRows::none;
    const models::PassOptions pass = pass_options(s.options);
    const std::int64_t first = s.cache.logical_position();
    const auto hand_on = [&](std::size_t, std::int64_t row, std::int64_t number,
                             std::span<const float> logits) {
      if (on_logits && !on_logits(first + row, number, logits)) go_on = false;
    };
    // Before the pass: after it nothing may fail, or the history and the cache would disagree.
    s.history.insert(s.history.end(), chunk.tokens.begin(), chunk.tokens.end());
    try {
      s.ran = s.model.forward({&chunk, 1}, pass, hand_on, s.pool);
    } catch (...) {
      s.history.resize(s.history.size() - chunk.tokens.size());
      throw;
    }
  }
}

bool Stream::has_room(std::int64_t tokens) const {
  return state_->options.window.has_value() ||
         state_->cache.logical_position() + tokens <= state_->model.config().context;
}

void Stream::check_room(std::int64_t tokens) const {
  if (has_room(tokens)) return;
  const std::int64_t context = state_->model.config().context;
  refuse(fmt::format("{} tokens exceed the model's trained context of {}",
                     state_->cache.logical_position() + tokens, context),
         fmt::format("stream them with --sink-tokens 4 --window {}, or cut the text with --max-tokens",
                     std::max<std::int64_t>(1, std::min<std::int64_t>(context, 1024) - 4)));
}

void Stream::check_ids(std::span<const std::int32_t> tokens) const {
  const std::int64_t vocabulary = state_->model.config().vocabulary;
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= vocabulary)
      refuse(fmt::format("token id {} is outside the vocabulary of {}", token, vocabulary));
  }
}

ThreadPool& Stream::pool() const {
  return state_->pool;
}

std::span<const std::int32_t> Stream::token_history() const {
  return state_->history;
}

StreamLengths Stream::lengths() const {
  const kv::Cache& cache = state_->cache.full();
  StreamLengths lengths;
  lengths.logical_position = cache.logical_position();
  lengths.cache_position = cache.cache_position();
  lengths.write_slot = cache.write_slot();
  lengths.kept_tokens = cache.kept_tokens();
  lengths.attention_tokens = cache.visible_tokens(cache.logical_position());
  lengths.ring_offset = cache.ring_offset();
  return lengths;
}

StreamReport Stream::report() const {
  StreamReport report;
  report.kept_tokens_max = state_->cache.full().kept_tokens_max();
  report.kv_bytes_max = state_->cache.kv_bytes_max();
  report.attention_backend = state_->ran.backend.data();  // static strings
  report.attention_target = state_->ran.target.data();
  return report;
}

}  // namespace basin::engine
