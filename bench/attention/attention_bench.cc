// Attention against what this machine can do: decode as a share of the measured read bandwidth, over more keys and
// values than the caches hold; prefill in GFLOP/s.
//
//   basin_attention_bench --benchmark_filter=decode
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "basin/attention/attention.h"

namespace basin::attention {
namespace {

constexpr std::int64_t kColdBytes = std::int64_t{512} << 20;  // many times the last-level cache

ThreadPool& pool() {
  static ThreadPool threads(0);
  return threads;
}

// A large block of bf16 or f32 ones in memory, touched once. Values do not matter for time.
std::vector<float>& cold_memory() {
  static std::vector<float> memory = [] {
    std::vector<float> m(static_cast<std::size_t>(kColdBytes / 4));
    const bf16 one = to_bf16(0.01f);
    const std::uint32_t two = std::uint32_t{one.bits} << 16 | one.bits;
    pool().parallel_for(64, [&](std::int64_t i, int) {
      const std::size_t part = m.size() / 64;
      std::fill_n(m.begin() + static_cast<std::ptrdiff_t>(part) * i, part, std::bit_cast<float>(two));
    });
    return m;
  }();
  return memory;
}

double sum_of(const float* p, std::size_t n) {
  typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
  Vector sum[4] = {};
  const Vector* v = reinterpret_cast<const Vector*>(p);
  for (std::size_t i = 0; i + 4 <= n / 16; i += 4) {
    for (std::size_t k = 0; k < 4; ++k) sum[k] += v[i + k];
  }
  double total = 0;
  for (const Vector& s : sum) total += static_cast<double>(s[0] + s[7] + s[15]);
  return total;
}

// Bytes per second of all threads reading memory that no cache holds; the best of several passes, measured once.
double read_bandwidth() {
  static const double best = [] {
    const std::vector<float>& m = cold_memory();
    double result = 0;
    for (int pass = 0; pass < 7; ++pass) {
      const auto begin = std::chrono::steady_clock::now();
      constexpr std::int64_t kParts = 128;
      pool().parallel_for(kParts, [&](std::int64_t i, int) {
        const std::size_t part = m.size() / kParts;
        benchmark::DoNotOptimize(sum_of(m.data() + part * static_cast<std::size_t>(i), part));
      });
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      result = std::max(result, static_cast<double>(kColdBytes) / seconds.count());
    }
    return result;
  }();
  return best;
}

struct Model {
  std::int64_t h_kv, group, d, tokens, chunk, window;
};

// One layer's call per iteration, walking through as many layers' caches as fit into the cold memory.
void run(benchmark::State& state, const Model& model, DType dtype) {
  const std::int64_t h_q = model.h_kv * model.group;
  const std::int64_t size = block_bytes(dtype);
  const std::int64_t side = model.tokens * model.h_kv * model.d * size;  // bytes of k or v of one layer
  const std::int64_t layers = std::max<std::int64_t>(1, kColdBytes / (2 * side));
  std::vector<float> q(static_cast<std::size_t>(model.chunk * h_q * model.d), 0.5f);
  std::vector<float> out(q.size());
  std::byte* memory = reinterpret_cast<std::byte*>(cold_memory().data());

  const Sequence sequence{0, model.chunk, 0, model.tokens, nullptr};
  Forward problem;
  problem.spec.scale = 1 / std::sqrt(static_cast<double>(model.d));
  problem.spec.mask.window = model.window;
  problem.sequences = {&sequence, 1};
  problem.q = contiguous<const void*>(q.data(), dtype, {model.chunk, h_q, model.d});
  problem.out = contiguous<void*>(out.data(), DType::f32, {model.chunk, h_q, model.d});

  std::int64_t layer = 0;
  for (auto _ : state) {
    std::byte* k = memory + layer * 2 * side;
    problem.k = contiguous<const void*>(k, dtype, {model.tokens, model.h_kv, model.d});
    problem.v = contiguous<const void*>(k + side, dtype, {model.tokens, model.h_kv, model.d});
    forward(problem, Backend::cpu, pool());
    benchmark::DoNotOptimize(out.data());
    layer = (layer + 1) % layers;
  }
  const auto calls = static_cast<double>(state.iterations());
  if (model.chunk == 1) {
    state.counters["bytes/s"] =
        benchmark::Counter(calls * static_cast<double>(2 * side), benchmark::Counter::kIsRate);
    state.counters["percent_of_read"] = benchmark::Counter(
        100 * calls * static_cast<double>(2 * side) / read_bandwidth(), benchmark::Counter::kIsRate);
  } else {
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < model.chunk; ++i) {
      const std::int64_t p = model.tokens - model.chunk + i;
      pairs += model.window == 0 ? p + 1 : std::min(model.window, p + 1);
    }
    state.counters["FLOP/s"] = benchmark::Counter(calls * 4 * static_cast<double>(pairs * h_q * model.d),
                                                  benchmark::Counter::kIsRate);
  }
}

void read_memory(benchmark::State& state) {
  for (auto _ : state) {
  }
  state.counters["bytes/s"] = read_bandwidth();
}

void register_all() {
  benchmark::RegisterBenchmark("read_memory", read_memory)->Iterations(1);
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t d : {64, 128}) {
      for (const std::int64_t group : {1, 2, 3, 4}) {
        const Model model{d == 64 ? 4 : 8, group, d, 4096, 1, 0};
        benchmark::RegisterBenchmark(
            fmt::format("decode/{}/keys:4096/d:{}/group:{}", name(dtype), d, group).c_str(),
            [=](benchmark::State& state) { run(state, model, dtype); })
            ->UseRealTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
    for (const Model& model :
         {Model{3, 3, 64, 2048, 512, 1024}, Model{8, 2, 128, 2048, 512, 0}, Model{4, 1, 64, 1024, 1024, 0}}) {
      benchmark::RegisterBenchmark(
          fmt::format("prefill/{}/keys:{}/chunk:{}/window:{}/d:{}/group:{}", name(dtype), model.tokens,
                      model.chunk, model.window, model.d, model.group)
              .c_str(),
          [=](benchmark::State& state) { run(state, model, dtype); })
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
