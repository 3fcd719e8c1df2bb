// A pass that is looked into computes what it computes otherwise, and goes on from the middle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kv/sequence_cache.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace basin::probe {
namespace {

struct Watcher : models::PassObserver {
  std::int64_t resume(std::span<float> x) override {
    if (from > 0)
      std::copy(states[static_cast<std::size_t>(from - 1)].begin(),
                states[static_cast<std::size_t>(from - 1)].end(), x.begin());
    return from;
  }
  void attended(std::int64_t layer, const attention::Forward& problem, ThreadPool&) override {
    attended_layers.push_back(layer);
    for (std::int64_t i = 0; i < problem.q.shape[0] * problem.q.shape[1]; ++i) {
      EXPECT_TRUE(std::isfinite(problem.lse[i]));
      EXPECT_EQ(problem.lse[i], problem.lse_with_sink[i]);  // no learned sink in this model
    }
  }
  void finished(std::int64_t layer, std::span<const float> x) override {
    ASSERT_EQ(attended_layers.back(), layer);
    if (static_cast<std::size_t>(layer) == states.size()) states.emplace_back(x.begin(), x.end());
  }
  std::int64_t from = 0;
  std::vector<std::int64_t> attended_layers;
  std::vector<std::vector<float>> states;
};

std::vector<float> logits(models::Model& model, models::PassObserver* observer) {
  const models::ModelConfig& config = model.config();
  const std::vector<std::int64_t> windows(config.layers.size(), 0);
  const kv::Shape shape{std::ssize(windows), config.h_kv, config.d_head, DType::f32, 16};
  kv::SequenceCache cache(std::make_shared<kv::PagePool>(shape), {}, windows);
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < 50; ++i) tokens.push_back((i * 37 + 11) % 300);
  ThreadPool pool(2);
  models::PassOptions options;
  options.compute = ops::Compute::fp32;
  options.observer = observer;
  std::vector<float> all;
  const models::Chunk chunk{tokens, &cache};
  model.forward(
      {&chunk, 1}, options,
      [&](std::size_t, std::int64_t, std::int64_t, std::span<const float> rows) {
        all.insert(all.end(), rows.begin(), rows.end());
      },
      pool);
  return all;
}

TEST(PassObserver, SeesEveryLayerAndChangesNothing) {
  const models::Loaded loaded = models::load(test::golden_model("llama"));
  const auto layers = static_cast<std::int64_t>(loaded.model->config().layers.size());
  const std::vector<float> plain = logits(*loaded.model, nullptr);
  Watcher watcher;
  EXPECT_EQ(logits(*loaded.model, &watcher), plain);
  ASSERT_EQ(static_cast<std::int64_t>(watcher.attended_layers.size()), layers);
  for (std::int64_t i = 0; i < layers; ++i)
    EXPECT_EQ(watcher.attended_layers[static_cast<std::size_t>(i)], i);

  for (std::int64_t from = 1; from <= layers; ++from) {
    watcher.from = from;
    watcher.attended_layers.clear();
    EXPECT_EQ(logits(*loaded.model, &watcher), plain) << "from layer " << from;
    EXPECT_EQ(static_cast<std::int64_t>(watcher.attended_layers.size()), layers - from);
  }
}

}  // namespace
}  // namespace basin::probe
