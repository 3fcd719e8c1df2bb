#include "cli/common.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "basin/base/error.h"
#include "cli/interrupt.h"
#include "text/tokenizer.h"

namespace basin::cli {

Session::Session(const ModelArgs& args)
    : pool(args.threads), loaded(models::load(args.model)), path_(args.model) {
  engine::check(args.stream, config());
  throw_if_interrupted();
}

const text::Tokenizer& Session::tokenizer(bool takes_ids) const {
  if (!loaded.tokenizer) {
    throw Error(ErrorCode::unsupported, fmt::format("{} has no tokenizer", path_),
                fmt::format("{}put the model's tokenizer.json beside its weights",
                            takes_ids ? "give token ids with --tokens FILE, or " : ""));
  }
  return *loaded.tokenizer;
}

std::string client_key(const std::optional<std::string>& given) {
  const char* set = std::getenv("BASIN_API_KEY");
  return given ? *given : set == nullptr ? std::string() : std::string(set);
}

std::string_view name(ops::Compute compute) {
  return compute == ops::Compute::fp32 ? "fp32" : "fast";
}

std::string streaming_flags(const models::ModelConfig& config) {
  const std::int64_t sink_tokens = std::min<std::int64_t>(4, config.context / 2);
  const std::int64_t window = std::min<std::int64_t>(1020, config.context - sink_tokens);
  return fmt::format("--sink-tokens {} --window {}", sink_tokens, window);
}

void check_fits(std::int64_t tokens, const models::ModelConfig& config, const engine::StreamOptions& options,
                std::string_view what, std::string_view other_hint) {
  if (options.window || tokens <= config.context) return;
  std::string hint = fmt::format("read it in bounded memory with {}", streaming_flags(config));
  if (!other_hint.empty()) hint += fmt::format(", or {}", other_hint);
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("{} has {} tokens, more than the {} of the model's context", what, tokens, config.context),
      hint);
}

void check_vocabulary(const std::vector<std::int32_t>& ids, const models::ModelConfig& config,
                      std::string_view what) {
  const auto outside = [&](std::int32_t id) { return id < 0 || id >= config.vocabulary; };
  const auto bad = std::find_if(ids.begin(), ids.end(), outside);
  if (bad == ids.end()) return;
  throw Error(ErrorCode::invalid_argument, fmt::format("token {} of {} is {}, outside the vocabulary of {}",
                                                       bad - ids.begin(), what, *bad, config.vocabulary));
}

std::string describe_visible(const engine::StreamOptions& options) {
  if (!options.window) return "all tokens";
  const std::string_view positions =
      options.positions == engine::PositionMode::in_cache ? "in-cache" : "absolute";
  return options.sink_tokens > 0 ? fmt::format("first {} + last {} tokens, {} positions", options.sink_tokens,
                                               *options.window, positions)
                                 : fmt::format("last {} tokens, {} positions", *options.window, positions);
}

}  // namespace basin::cli
