// The probe of a whole model: one pass over the text, layer by layer, each layer's result on disk as soon as it is there.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kv/cache.h"
#include "models/model.h"
#include "probe/layer.h"

namespace basin::probe {

/// The first `sink_tokens` keys and the last `window`, the query included.
struct Pair {
  std::int64_t sink_tokens = 0, window = 0;
};

struct RunOptions {
  kv::Policy policy;  // what the model reads with
  std::int64_t page_tokens = 16;
  ops::Compute compute = ops::Compute::fast;
  models::IndexOptions index;  // of models with indexers
  LayerOptions layer;
  std::string model;             // names the run, so that another one does not go on from its files
  std::filesystem::path folder;  // where each layer's result goes; made when it is missing
};

/// What is known of a layer. Of a model with indexers that is what each query selected (profile.topk) and the share of the
/// attention that it holds (profile.topk_mass). Errors are those of its attention output alone, keys at their own positions:
/// |O' - O| / |O|, mean over queries, which are spread over those from which every pair of this window hides something. NaN
/// where the layer has a window of its own.
struct LayerResult {
  LayerProfile profile;
  std::vector<Pair> pairs;
  std::vector<float> pair_error;      // [pairs, heads]
  std::vector<float> pair_error_all;  // [pairs] of all heads together
};

/// Tokens, counted over layers, that are done of those to do.
using OnProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Runs the model over `tokens` and leaves one file per layer in `options.folder`. Goes on after the last complete layer
/// of the same run; throws Error(invalid_argument) when the folder holds another run's files, Error(cancelled) when
/// `cancel` (may be null) turns true, and what the model throws. Returns how many layers were there already.
std::int64_t run(models::Model& model, std::span<const std::int32_t> tokens, const RunOptions& options,
                 ThreadPool& pool, const OnProgress& on_progress, const std::atomic<bool>* cancel);

/// The file of a layer.
std::filesystem::path layer_file(const std::filesystem::path& folder, std::int64_t layer);
void write_layer(const std::filesystem::path& path, const LayerResult& result);
/// Throws Error(not_found | corrupt | io).
LayerResult read_layer(const std::filesystem::path& path);

/// Share of the attention over all visible keys that falls on those over which `problem.lse` was taken: [q_tokens], mean over
/// heads. One sequence.
std::vector<float> mass_of_selections(const attention::Forward& problem, ThreadPool& pool);

/// The output errors of `result`, for pairs that hide something in a text of this length.
void measure_errors(const attention::Forward& problem, ThreadPool& pool, LayerResult& result);

}  // namespace basin::probe
