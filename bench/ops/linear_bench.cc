// Products at SmolLM2-135M's shapes: prefill of 512 tokens in GFLOP/s, decode of one sequence and of a server's 8 and 32 in bytes of
// weights per second. Decode walks over more weights than the last-level cache holds, so that they come from memory as in a model.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "ops/linear.h"

namespace basin::ops {
namespace {

constexpr std::int64_t kDecodeBytes = std::int64_t{256} << 20;

struct Shape {
  std::int64_t outputs, inputs;
};
constexpr Shape kShapes[] = {{576, 576}, {1536, 576}, {576, 1536}, {49152, 576}, {2048, 2048}};

void run(benchmark::State& state, DType dtype, Compute compute, Shape shape, std::int64_t tokens) {
  ThreadPool pool(0);
  WeightMatrix weight{nullptr, dtype, shape.outputs, shape.inputs};
  const std::int64_t matrix_bytes = weight.row_bytes() * weight.outputs;
  const std::int64_t copies = tokens < 512 ? std::max<std::int64_t>(1, kDecodeBytes / matrix_bytes) : 1;
  const std::vector<std::byte> bytes(static_cast<std::size_t>(copies * matrix_bytes), std::byte{1});
  const std::vector<float> x(static_cast<std::size_t>(tokens * shape.inputs), 0.5f);
  std::vector<float> y(static_cast<std::size_t>(tokens * shape.outputs));
  const LinearOutput output{&weight, nullptr, y.data(), shape.outputs};
  std::int64_t copy = 0;
  for (auto _ : state) {
    weight.data = bytes.data() + copy * matrix_bytes;
    copy = (copy + 1) % copies;
    linear(x.data(), shape.inputs, tokens, {&output, 1}, compute, pool);
    benchmark::ClobberMemory();
  }
  const double products = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * products * static_cast<double>(tokens * shape.outputs * shape.inputs),
                         benchmark::Counter::kIsRate);
  state.counters["GB/s"] =
      benchmark::Counter(1e-9 * products * static_cast<double>(matrix_bytes), benchmark::Counter::kIsRate);
}

void add_all() {
  for (const DType dtype : {DType::bf16, DType::q8_0, DType::q4_0, DType::q4_1, DType::q5_0, DType::mxfp4,
                            DType::q4_k, DType::q5_k, DType::q6_k}) {
    for (const Compute compute : {Compute::fast, Compute::fp32}) {
      for (const Shape shape : kShapes) {
        if (shape.inputs % block_elements(dtype) != 0) continue;
        for (const std::int64_t tokens : {1, 8, 32, 512}) {
          const std::string title = std::string(name(dtype)) +
                                    (compute == Compute::fast ? "/fast/" : "/fp32/") +
                                    std::to_string(shape.outputs) + "x" + std::to_string(shape.inputs) +
                                    "/tokens:" + std::to_string(tokens);
          benchmark::RegisterBenchmark(
              title.c_str(), [=](benchmark::State& state) { run(state, dtype, compute, shape, tokens); })
              ->UseRealTime()
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
}

}  // namespace
}  // namespace basin::ops

int main(int argc, char** argv) {
  basin::ops::add_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
