// What the sub-commands that run a model share: loading it, its stream, and the checks before any work.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "basin/base/thread_pool.h"
#include "cli/args.h"
#include "models/model.h"

namespace basin::cli {

/// A loaded model with its threads; the options are checked against it. Declared in the order of lifetime.
struct Session {
  explicit Session(const ModelArgs& args);

  ThreadPool pool;
  models::Loaded loaded;

  const models::ModelConfig& config() const { return loaded.model->config(); }

  /// The tokenizer. Throws Error(unsupported) when the model has none; the hint names --tokens where that flag `takes_ids`.
  const text::Tokenizer& tokenizer(bool takes_ids) const;

 private:
  std::string path_;
};

/// The key to show to a server: `given`, or else that of BASIN_API_KEY; empty when there is none.
std::string client_key(const std::optional<std::string>& given);

std::string_view name(ops::Compute compute);  // "fp32", "fast"

/// Throws Error(invalid_argument) when `tokens` go beyond the trained context and no window is set. `what` opens
/// the message ("the prompt"); `other_hint` (may be empty) names another way out.
void check_fits(std::int64_t tokens, const models::ModelConfig& config, const engine::StreamOptions& options,
                std::string_view what, std::string_view other_hint);

/// "--sink-tokens 4 --window 1020", or less where the context is smaller: flags that read on for ever.
std::string streaming_flags(const models::ModelConfig& config);

/// Throws Error(invalid_argument) naming the first id outside the vocabulary.
void check_vocabulary(const std::vector<std::int32_t>& ids, const models::ModelConfig& config,
                      std::string_view what);

/// "first 4 + last 1020 tokens, in-cache positions" or "all tokens".
std::string describe_visible(const engine::StreamOptions& options);

}  // namespace basin::cli
