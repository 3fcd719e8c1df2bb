#include "probe/run.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "kv/sequence_cache.h"
#include "models/cache.h"
#include "weights/atomic_file.h"
#include "weights/weights.h"

namespace basin::probe {
namespace {

namespace fs = std::filesystem;

// FNV-1a over words of 32 bits: tells runs apart and shows damage, nothing more.
std::string hash(std::span<const std::byte> bytes) {
  std::uint64_t value = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i + 4 <= bytes.size(); i += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i, 4);
    value = (value ^ word) * 0x100000001b3u;
  }
  return fmt::format("{:016x}", value);
}

nlohmann::json describe(const models::Model& model, std::span<const std::int32_t> tokens,
                        const RunOptions& options) {
  return {{"schema", "basin.probe.layers/2"},
          {"model", options.model},
          {"architecture", model.config().architecture},
          {"parameters", model.parameters()},
          {"weight_bytes", model.weight_bytes()},
          {"tokens", tokens.size()},
          {"tokens_hash", hash(std::as_bytes(tokens))},
          {"compute", options.compute == ops::Compute::fp32 ? "fp32" : "fast"},
          {"sink_tokens", options.policy.sink_tokens},
          {"window", options.policy.window},
          {"in_cache_positions", options.policy.in_cache_positions},
          {"index_fp8", options.index.fp8},
          {"index_sink_tokens", options.index.sink_tokens},
          {"index_window", options.index.window},
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

  void selected(std::int64_t layer, std::span<const std::int32_t> indices, const attention::Forward& problem,
                ThreadPool& pool) override {
    throw_if_cancelled();
    LayerResult result;
    result.profile.tokens = tokens_;
    result.profile.topk_width = static_cast<std::int64_t>(indices.size()) / tokens_;
    result.profile.topk.assign(indices.begin(), indices.end());
    result.profile.topk_mass = mass_of_selections(problem, pool);
    write_layer(layer_file(options_.folder, layer), result);
  }

  void finished(std::int64_t layer, std::span<const float> x) override {
    throw_if_cancelled();
    // A layer that takes the selection of the one before it cannot be the first to run.
    if (layer + 1 < layers_ && takes_selection(layer + 1)) return;
    const weights::Tensor state{
        "x", DType::f32, {tokens_, hidden_}, reinterpret_cast<const std::byte*>(x.data()), x.size_bytes()};
    weights::write_safetensors(state_file(), {state},
                               {{"layers", std::to_string(layer + 1)}, {"hash", hash(std::as_bytes(x))}});
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
    const std::string text = description.dump(2) + "\n";
    weights::AtomicFile file(path);
    file.write(text.data(), text.size());
    file.commit();
  }

  // What cannot be read is said at once, before hours of other layers.
  void read_state() {
    if (!fs::exists(state_file())) return;
    try {
      complete_ = read_complete();
      for (std::int64_t layer = 0; layer < complete_; ++layer) read_layer(layer_file(options_.folder, layer));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::corrupt && error.code() != ErrorCode::not_found) throw;
      throw Error(ErrorCode::corrupt, error.what(),
                  fmt::format("remove {} and start anew; nothing else is lost", options_.folder.string()));
    }
  }

  std::int64_t read_complete() const {
    const weights::SafetensorsFile file = weights::read_safetensors(state_file());
    const auto x = file.tensors.find("x");
    const auto layers = file.metadata.find("layers"), written = file.metadata.find("hash");
    const auto refuse = [&](const char* what) {
      throw Error(ErrorCode::corrupt, fmt::format("{}: {}", state_file().string(), what));
    };
    const std::vector<std::int64_t> shape = {tokens_, hidden_};
    if (x == file.tensors.end() || layers == file.metadata.end() || written == file.metadata.end() ||
        x->second.shape != shape || x->second.dtype != DType::f32) {
      refuse("it is not what a probe writes");
    }
    std::int64_t complete = 0;
    const char *begin = layers->second.data(), *end = begin + layers->second.size();
    const auto [stop, error] = std::from_chars(begin, end, complete);
    if (error != std::errc() || stop != end || complete < 1 || complete > layers_)
      refuse("its number of layers is none of this model");
    if (hash({x->second.data, x->second.bytes}) != written->second) refuse("its content is damaged");
    return complete;
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
  const std::vector<std::int64_t> windows = models::layer_windows(config);
  // A layer has been looked at before the next one writes its keys: memory of one is enough.
  kv::SequenceCache cache(kv::layer_kinds(windows, shape, kv::LayerRows::shared), options.policy, windows);
  const models::Chunk chunk{tokens, &cache, models::LogitsRows::none};
  models::PassOptions pass;
  pass.compute = options.compute;
  pass.observer = &recorder;
  pass.index = options.index;
  model.forward({&chunk, 1}, pass, {}, pool);
  return before;
}

}  // namespace basin::probe
