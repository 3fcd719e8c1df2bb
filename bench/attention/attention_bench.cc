// Attention against what this machine can do: decode against the time of reading its keys and values once, all of them
// out of the caches; prefill in GFLOP/s.
//
//   basin_attention_bench --benchmark_filter=decode
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "basin/attention/attention.h"
#include "cold_memory.h"

namespace basin::attention {
namespace {

struct Model {
  std::int64_t h_kv, group, d, tokens, chunk, window;
};

// A layer's call, and memory that holds the keys and values of as many layers as fit, so that each call finds them cold.
class Layers {
 public:
  Layers(const Model& model, DType dtype)
      : model_(model),
        dtype_(dtype),
        side_bytes_(model.tokens * model.h_kv * model.d * block_bytes(dtype)),
        q_(static_cast<std::size_t>(model.chunk * model.h_kv * model.group * model.d), 0.5f),
        out_(q_.size()),
        sequence_{0, model.chunk, 0, model.tokens, nullptr} {
    const std::int64_t h_q = model.h_kv * model.group;
    problem_.spec.scale = 1 / std::sqrt(static_cast<double>(model.d));
    problem_.spec.mask.window = model.window;
    problem_.sequences = {&sequence_, 1};
    problem_.q = contiguous<const void*>(q_.data(), dtype, {model.chunk, h_q, model.d});
    problem_.out = contiguous<void*>(out_.data(), DType::f32, {model.chunk, h_q, model.d});
  }

  std::int64_t bytes() const { return 2 * side_bytes_; }  // of one layer

  /// The keys, then the values of another layer than the last times.
  const std::byte* next() {
    const std::byte* layer = reinterpret_cast<const std::byte*>(cold_memory().data()) + next_ * bytes();
    next_ = (next_ + 1) % std::max<std::int64_t>(1, kColdBytes / bytes());
    return layer;
  }

  void attend(const std::byte* layer) {
    problem_.k = contiguous<const void*>(layer, dtype_, {model_.tokens, model_.h_kv, model_.d});
    problem_.v = contiguous<const void*>(layer + side_bytes_, dtype_, {model_.tokens, model_.h_kv, model_.d});
    forward(problem_, Backend::cpu, pool());
    benchmark::DoNotOptimize(out_.data());
  }

 private:
  Model model_;
  DType dtype_;
  std::int64_t side_bytes_;
  std::vector<float> q_, out_;
  Sequence sequence_;
  Forward problem_;
  std::int64_t next_ = 0;
};

// Each call is preceded by a plain read of as many other bytes: its time is the floor, measured in the same moment,
// since the bandwidth of a shared machine changes from minute to minute. Medians of both.
void decode(benchmark::State& state, const Model& model, DType dtype) {
  Layers layers(model, dtype);
  std::vector<double> floor, call;
  for (auto _ : state) {
    floor.push_back(read_seconds(layers.next(), layers.bytes()));
    const std::byte* layer = layers.next();
    call.push_back(seconds_of([&] { layers.attend(layer); }));
    state.SetIterationTime(call.back());
  }
  state.counters["median_us"] = 1e6 * median(call);
  state.counters["floor_us"] = 1e6 * median(floor);
  state.counters["floor_bytes/s"] = static_cast<double>(layers.bytes()) / median(floor);
  state.counters["percent_of_floor"] = 100 * median(floor) / median(call);
}

void prefill(benchmark::State& state, const Model& model, DType dtype) {
  Layers layers(model, dtype);
  for (auto _ : state) layers.attend(layers.next());
  std::int64_t pairs = 0;
  for (std::int64_t i = 0; i < model.chunk; ++i) {
    const std::int64_t p = model.tokens - model.chunk + i;
    pairs += model.window == 0 ? p + 1 : std::min(model.window, p + 1);
  }
  state.counters["FLOP/s"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * 4 *
                             static_cast<double>(pairs * model.h_kv * model.group * model.d),
                         benchmark::Counter::kIsRate);
}

// Streaming through all of the cold memory.
void read_memory(benchmark::State& state) {
  const std::byte* memory = reinterpret_cast<const std::byte*>(cold_memory().data());
  std::vector<double> seconds;
  for (auto _ : state) seconds.push_back(read_seconds(memory, kColdBytes));
  state.counters["bytes/s"] = static_cast<double>(kColdBytes) / median(seconds);
}

void register_all() {
  benchmark::RegisterBenchmark("read_memory", read_memory)->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t d : {64, 128}) {
      for (const std::int64_t group : {1, 2, 3, 4}) {
        const Model model{d == 64 ? 4 : 8, group, d, 4096, 1, 0};
        benchmark::RegisterBenchmark(
            fmt::format("decode/{}/keys:4096/d:{}/group:{}", name(dtype), d, group).c_str(),
            [=](benchmark::State& state) { decode(state, model, dtype); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
    for (const Model& model :
         {Model{3, 3, 64, 2048, 512, 1024}, Model{8, 2, 128, 2048, 512, 0}, Model{4, 1, 64, 1024, 1024, 0},
          Model{4, 4, 64, 4096, 4096, 0}, Model{4, 4, 128, 4096, 4096, 0}}) {
      benchmark::RegisterBenchmark(
          fmt::format("prefill/{}/keys:{}/chunk:{}/window:{}/d:{}/group:{}", name(dtype), model.tokens,
                      model.chunk, model.window, model.d, model.group)
              .c_str(),
          [=](benchmark::State& state) { prefill(state, model, dtype); })
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
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
