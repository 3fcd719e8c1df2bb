// Attention over selected keys, beside dense attention over as many keys that lie side by side and the time of reading them once; and
// what selects them. All keys are out of the caches.
//
//   basin_sparse_bench --benchmark_filter=decode
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "basin/attention/sparse.h"
#include "cold_memory.h"

namespace basin::attention {
namespace {

struct Model {
  const char* name;
  std::int64_t h_kv, group, d_qk, d_v;
  bool latent;  // values are the first part of the keys
};
// DeepSeek-V3.2 absorbed, whole and as one of eight devices has it; and heads with keys of their own.
constexpr Model kModels[] = {
    {"latent_128", 1, 128, 576, 512, true},
    {"latent_16", 1, 16, 576, 512, true},
    {"heads_8x4", 8, 4, 128, 128, false},
};

// A layer's keys of which each query selects `topk` by chance, and as many keys side by side.
class Layers {
 public:
  Layers(const Model& model, DType dtype, std::int64_t keys, std::int64_t queries, std::int64_t topk)
      : model_(model),
        dtype_(dtype),
        keys_(keys),
        topk_(topk),
        h_q_(model.h_kv * model.group),
        q_(static_cast<std::size_t>(queries * h_q_ * model.d_qk), 0.5f),
        out_(static_cast<std::size_t>(queries * h_q_ * model.d_v)),
        sequence_{0, queries, 0, keys, nullptr} {
    std::mt19937 random(1);
    std::vector<std::int32_t> all(static_cast<std::size_t>(keys - queries));
    std::iota(all.begin(), all.end(), 0);
    for (std::int64_t i = 0; i < queries; ++i) {
      std::shuffle(all.begin(), all.end(), random);
      indices_.insert(indices_.end(), all.begin(), all.begin() + topk);
      std::sort(indices_.end() - topk, indices_.end());
    }
    problem_.spec.scale = 1 / std::sqrt(static_cast<double>(model.d_qk));
    problem_.q = contiguous<const void*>(q_.data(), dtype, {queries, h_q_, model.d_qk});
    problem_.out = contiguous<void*>(out_.data(), DType::f32, {queries, h_q_, model.d_v});
  }

  std::int64_t bytes(std::int64_t keys) const {
    const std::int64_t d = model_.latent ? model_.d_qk : model_.d_qk + model_.d_v;
    return keys * model_.h_kv * d * block_bytes(dtype_);
  }
  double flops(std::int64_t pairs) const {
    return 2.0 * static_cast<double>(pairs * h_q_ * (model_.d_qk + model_.d_v));
  }

  const std::byte* next(std::int64_t keys) {
    const std::int64_t step = (bytes(keys) + 4095) / 4096 * 4096;
    if (next_ + step > kColdBytes) next_ = 0;
    const std::byte* layer = reinterpret_cast<const std::byte*>(cold_memory().data()) + next_;
    next_ += step;
    return layer;
  }

  void sparse(const std::byte* layer) {
    set_keys(layer, keys_);
    forward(problem_, {indices_.data(), topk_, nullptr}, Backend::cpu, pool());
  }
  /// Every query sees topk keys side by side.
  void dense(const std::byte* layer) {
    set_keys(layer, topk_ + sequence_.q_tokens - 1);
    problem_.spec.mask.window = topk_;
    if (model_.latent) {
      forward(problem_, Selection{}, Backend::cpu, pool());
    } else {
      forward(problem_, Backend::cpu, pool());
    }
    problem_.spec.mask.window = 0;
  }

 private:
  void set_keys(const std::byte* layer, std::int64_t keys) {
    sequence_.kv_tokens = keys;
    problem_.sequences = {&sequence_, 1};
    problem_.k = contiguous<const void*>(layer, dtype_, {keys, model_.h_kv, model_.d_qk});
    problem_.v = problem_.k;
    if (!model_.latent)
      problem_.v = contiguous<const void*>(layer + keys * model_.h_kv * model_.d_qk * block_bytes(dtype_),
                                           dtype_, {keys, model_.h_kv, model_.d_v});
    problem_.v.shape[2] = model_.d_v;
  }

  Model model_;
  DType dtype_;
  std::int64_t keys_, topk_, h_q_;
  std::vector<float> q_, out_;
  std::vector<std::int32_t> indices_;
  Sequence sequence_;
  Forward problem_;
  std::int64_t next_ = 0;
};

// The three take turns: the bandwidth of a shared machine changes from minute to minute.
void attend(benchmark::State& state, const Model& model, DType dtype, std::int64_t keys, std::int64_t queries,
            std::int64_t topk) {
  Layers layers(model, dtype, keys, queries, topk);
  std::vector<double> floor, dense, sparse;
  for (auto _ : state) {
    floor.push_back(read_seconds(layers.next(topk), layers.bytes(topk)));
    const std::byte* near = layers.next(topk + queries);
    dense.push_back(seconds_of([&] { layers.dense(near); }));
    const std::byte* far = layers.next(keys);
    sparse.push_back(seconds_of([&] { layers.sparse(far); }));
    state.SetIterationTime(sparse.back());
  }
  state.counters["median_us"] = 1e6 * median(sparse);
  state.counters["dense_us"] = 1e6 * median(dense);
  state.counters["floor_us"] = 1e6 * median(floor);
  state.counters["of_dense"] = median(sparse) / median(dense);
  state.counters["FLOP/s"] = layers.flops(queries * topk) / median(sparse);
  state.counters["percent_of_floor"] = 100 * median(floor) / median(sparse);
}

// DeepSeek-V3.2's indexer: 64 heads of 128 over one key each, top 2,048.
void select_keys(benchmark::State& state, std::int64_t keys, std::int64_t queries) {
  constexpr std::int64_t kHeads = 64, kHead = 128, kTopk = 2048;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<bf16> q(static_cast<std::size_t>(queries * kHeads * kHead)),
      k(static_cast<std::size_t>(keys * kHead));
  for (bf16& x : q) x = to_bf16(normal(random));
  for (bf16& x : k) x = to_bf16(normal(random));
  std::vector<float> weights(static_cast<std::size_t>(queries * kHeads), 0.01f);
  std::vector<std::int32_t> indices(static_cast<std::size_t>(queries * kTopk));
  const Sequence sequence{0, queries, 0, keys, nullptr};
  Indexer problem;
  problem.sequences = {&sequence, 1};
  problem.q = contiguous<const void*>(q.data(), DType::bf16, {queries, kHeads, kHead});
  problem.k = contiguous<const void*>(k.data(), DType::bf16, {keys, 1, kHead});
  problem.weights = weights.data();
  problem.topk = kTopk;
  problem.indices = indices.data();
  std::vector<double> seconds;
  for (auto _ : state) seconds.push_back(seconds_of([&] { select(problem, Backend::cpu, pool()); }));
  double pairs = 0;
  for (std::int64_t i = 0; i < queries; ++i) pairs += static_cast<double>(keys - queries + i + 1);
  state.counters["median_us"] = 1e6 * median(seconds);
  state.counters["FLOP/s"] = 2.0 * pairs * kHeads * kHead / median(seconds);
}

void register_all() {
  constexpr std::int64_t kTopk = 2048;
  for (const Model& model : kModels) {
    for (const auto& [keys, queries] : {std::pair<std::int64_t, std::int64_t>{32768, 1}, {8192, 64}}) {
      benchmark::RegisterBenchmark(
          fmt::format("{}/{}/keys:{}/queries:{}/topk:{}", queries == 1 ? "decode" : "prefill", model.name,
                      keys, queries, kTopk)
              .c_str(),
          [=](benchmark::State& state) { attend(state, model, DType::bf16, keys, queries, kTopk); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  for (const auto& [keys, queries] :
       {std::pair<std::int64_t, std::int64_t>{32768, 1}, {8192, 64}, {131072, 1}}) {
    benchmark::RegisterBenchmark(fmt::format("select/keys:{}/queries:{}", keys, queries).c_str(),
                                 [=](benchmark::State& state) { select_keys(state, keys, queries); })
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

}  // namespace
}  // namespace basin::attention

int main(int argc, char** argv) {
  basin::attention::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
