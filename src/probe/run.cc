#include "probe/run.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "kv/sequence_cache.h"
#include "models/cache.h"
#include "weights/weights.h"

namespace basin::probe {
namespace {

namespace fs = std::filesystem;

// FNV-1a: tells runs apart, nothing more.
std::uint64_t hash(std::span<const std::int32_t> tokens) {
  std::uint64_t value = 0xcbf29ce484222325u;
  for (const std::int32_t token : tokens) {
    value = (value ^ static_cast<std::uint32_t>(token)) * 0x100000001b3u;
  }
  return value;
}

nlohmann::json describe(const models::Model& model, std::span<const std::int32_t> tokens,
                        const RunOptions& options) {
  return {{"schema", "basin.probe.layers/1"},
          {"model", options.model},
          {"architecture", model.config().architecture},
          {"parameters", model.parameters()},
          {"weight_bytes", model.weight_bytes()},
          {"tokens", tokens.size()},
          {"tokens_hash", fmt::format("{:016x}", hash(tokens))},
          {"compute", options.compute == ops::Compute::fp32 ? "fp32" : "fast"},
          {"sink_tokens", options.policy.sink_tokens},
          {"window", options.policy.window},
          {"in_cache_positions", options.policy.in_cache_positions},
          {"index_fp8", options.index_fp8},
          {"map_bins", options.layer.map_bins},
          {"topk", options.layer.topk}};
}

class Recorder : public models::PassObserver {
 public:
  Recorder(const models::Model& model, std::span<const std::int32_t> tokens, const RunOptions& options,
           const OnProgress& on_progress, const std::atomic<bool>* cancel)
      : config_(model.config()),
        options_(options),
        on_progress_(on_progress),
        cancel_(cancel),
        layers_(static_cast<std::int64_t>(model.config().layers.size())),
        tokens_(static_cast<std::int64_t>(tokens.size())),
        hidden_(model.config().hidden) {
    open(describe(model, tokens, options));
  }

  std::int64_t complete() const { return complete_; }
  bool finished_all() const { return complete_ == layers_; }

  std::int64_t resume(std::span<float> x) override {
    if (complete_ > 0) {
      const weights::SafetensorsFile file = weights::read_safetensors(state_file());
      const weights::Tensor& state = file.tensors.at("x");
      std::memcpy(x.data(), state.data, state.bytes);
    }
    return complete_;
  }

  void attended(std::int64_t layer, const attention::Forward& problem, ThreadPool& pool) override {
    throw_if_cancelled();
    LayerResult result;
    result.profile = profile(problem, options_.layer, pool);
    throw_if_cancelled();
    measure_errors(problem, pool, result);
    write_layer(layer_file(options_.folder, layer), result);
  }

  void selected(std::int64_t layer, std::span<const std::int32_t> indices) override {
    throw_if_cancelled();
    LayerResult result;
    result.profile.tokens = tokens_;
    result.profile.topk_width = static_cast<std::int64_t>(indices.size()) / tokens_;
    result.profile.topk.assign(indices.begin(), indices.end());
    write_layer(layer_file(options_.folder, layer), result);
  }

  void finished(std::int64_t layer, std::span<const float> x) override {
    throw_if_cancelled();
    // A layer that takes the selection of the one before it cannot be the first to run.
    if (layer + 1 < layers_ && takes_selection(layer + 1)) return;
    const weights::Tensor state{
        "x", DType::f32, {tokens_, hidden_}, reinterpret_cast<const std::byte*>(x.data()), x.size_bytes()};
    weights::write_safetensors(state_file(), {state}, {{"layers", std::to_string(layer + 1)}});
    if (on_progress_) on_progress_((layer + 1) * tokens_, layers_ * tokens_);
  }

 private:
  bool takes_selection(std::int64_t layer) const {
    return config_.indexer && config_.indexer->shared[static_cast<std::size_t>(layer)];
  }

  fs::path state_file() const { return options_.folder / "state.safetensors"; }

  void throw_if_cancelled() const {
    if (cancel_ != nullptr && cancel_->load(std::memory_order_relaxed)) {
      throw Error(ErrorCode::cancelled, "cancelled");
    }
  }

  // Makes the folder this run's, or takes up what this run left in it.
  void open(const nlohmann::json& description) {
    std::error_code error;
    fs::create_directories(options_.folder, error);
    if (error) {
      throw Error(ErrorCode::io,
                  fmt::format("cannot make {}: {}", options_.folder.string(), error.message()));
    }
    const fs::path path = options_.folder / "run.json";
    if (fs::exists(path)) {
      std::ifstream file(path);
      const nlohmann::json found = nlohmann::json::parse(file, nullptr, false);
      if (found != description) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("{} holds layers of another run: other model, text or options",
                                options_.folder.string()),
                    "choose another --out, or remove that folder");
      }
      read_state();
      return;
    }
    std::ofstream file(path);
    file << description.dump(2) << '\n';
    file.close();
    if (!file) throw Error(ErrorCode::io, fmt::format("cannot write {}", path.string()));
  }

  void read_state() {
    if (!fs::exists(state_file())) return;
    const weights::SafetensorsFile file = weights::read_safetensors(state_file());
    const auto x = file.tensors.find("x");
    const auto layers = file.metadata.find("layers");
    const std::vector<std::int64_t> shape = {tokens_, hidden_};
    if (x == file.tensors.end() || layers == file.metadata.end() || x->second.shape != shape ||
        x->second.dtype != DType::f32) {
      throw Error(ErrorCode::corrupt, fmt::format("{} is not what a probe writes", state_file().string()),
                  "remove that folder to start anew");
    }
    for (std::int64_t layer = 0; layer < layers_ && std::to_string(layer) != layers->second; ++layer) {
      if (!fs::exists(layer_file(options_.folder, layer))) {
        throw Error(ErrorCode::corrupt,
                    fmt::format("{} is missing", layer_file(options_.folder, layer).string()),
                    "remove that folder to start anew");
      }
      complete_ = layer + 1;
    }
  }

  const models::ModelConfig& config_;
  const RunOptions& options_;
  const OnProgress& on_progress_;
  const std::atomic<bool>* cancel_;
  std::int64_t layers_, tokens_, hidden_;
  std::int64_t complete_ = 0;
};

}  // namespace

std::int64_t run(models::Model& model, std::span<const std::int32_t> tokens, const RunOptions& options,
                 ThreadPool& pool, const OnProgress& on_progress, const std::atomic<bool>* cancel) {
  const models::ModelConfig& config = model.config();
  Recorder recorder(model, tokens, options, on_progress, cancel);
  const std::int64_t before = recorder.complete();
  if (recorder.finished_all()) return before;
  // Where an indexer selects, the selections are what is looked at; else the weights of every head over keys of its own.
  const auto form = config.indexer ? models::LatentForm::absorbed : models::LatentForm::expanded;
  const kv::Shape shape = models::cache_shape(config, options.compute, options.page_tokens, form);
  kv::SequenceCache cache = models::make_cache(config, std::make_shared<kv::PagePool>(shape), options.policy);
  const models::Chunk chunk{tokens, &cache, models::LogitsRows::none};
  models::PassOptions pass;
  pass.compute = options.compute;
  pass.observer = &recorder;
  pass.index_fp8 = options.index_fp8;
  model.forward({&chunk, 1}, pass, {}, pool);
  return before;
}

}  // namespace basin::probe
