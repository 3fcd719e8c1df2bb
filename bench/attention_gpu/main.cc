// The speed table of attention on the GPU, with cold caches: milliseconds, TFLOP/s or TB/s, and the share of what the same
// device copies and multiplies in the same run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "attention_gpu/work.h"

namespace basin::bench {
namespace {

struct Options {
  double gemm_tflops = 0;
  double budget_ms = 250;
  std::string filter;
  bool json = false;
};

nlohmann::json describe_device() {
  cudaDeviceProp properties{};
  int driver = 0, runtime = 0;
  expect_success(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  expect_success(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  expect_success(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return {{"device", properties.name},
          {"multiprocessors", properties.multiProcessorCount},
          {"cuda_driver", driver},
          {"cuda_runtime", runtime}};
}

void run(const Options& options) {
  std::vector<Work> works = all_work();
  std::erase_if(works, [&](const Work& work) { return work.name.find(options.filter) == std::string::npos; });
  std::size_t noise_bytes = 0;
  for (const Work& work : works) noise_bytes = std::max(noise_bytes, Prepared::noise_bytes(work));

  nlohmann::json report = describe_device();
  const double copy = copy_bandwidth();
  report["copy_tb_s"] = copy * 1e-12;
  report["gemm_tflops"] = options.gemm_tflops;
  report["rows"] = nlohmann::json::array();
  std::FILE* text = options.json ? stderr : stdout;
  fmt::print(text, "{}, {} SMs; copy {:.2f} TB/s; GEMM {}\n", report["device"].get<std::string>(),
             report["multiprocessors"].get<int>(), copy * 1e-12,
             options.gemm_tflops > 0 ? fmt::format("{:.0f} TFLOP/s", options.gemm_tflops)
                                     : "not given (--gemm-tflops)");
  fmt::print(text, "{:<52} {:>9} {:>9} {:>8} {:>8} {:>7}\n", "work (bf16, 8 key heads, sink_logit)", "ms",
             "TFLOP/s", "TB/s", "% GEMM", "% copy");
  const DeviceMemory noise = allocate_noise(noise_bytes);
  for (const Work& work : works) {
    const Prepared prepared(work, noise, noise_bytes);
    if (const std::string reason = prepared.refusal(); !reason.empty()) {
      fmt::print(text, "{:<52} not run: {}\n", work.name, reason);
      report["rows"].push_back({{"work", work.name}, {"refused", reason}});
      continue;
    }
    const double ms = median_ms([&] { prepared.launch(); }, options.budget_ms);
    const Cost cost = cost_of(work);
    const double tflops = cost.flops / ms * 1e-9, tb_s = cost.bytes / ms * 1e-9;
    nlohmann::json row = {{"work", work.name},
                          {"ms", ms},
                          {"tflops", tflops},
                          {"tb_s", tb_s},
                          {"percent_of_copy", 1e14 * tb_s / copy}};
    std::string gemm = "-";
    if (options.gemm_tflops > 0) {
      row["percent_of_gemm"] = 100 * tflops / options.gemm_tflops;
      gemm = fmt::format("{:.1f}", 100 * tflops / options.gemm_tflops);
    }
    fmt::print(text, "{:<52} {:>9.4f} {:>9.1f} {:>8.3f} {:>8} {:>7.1f}\n", work.name, ms, tflops, tb_s, gemm,
               1e14 * tb_s / copy);
    std::fflush(text);
    report["rows"].push_back(row);
  }
  if (options.json) fmt::print("{}\n", report.dump(2));
}

}  // namespace
}  // namespace basin::bench

int main(int argc, char** argv) {
  basin::bench::Options options;
  CLI::App app("Attention on the GPU against what the device copies and multiplies.");
  app.add_option("--gemm-tflops", options.gemm_tflops,
                 "a bf16 GEMM of 4096 in the same session (tools/bench_peers.py)")
      ->check(CLI::PositiveNumber);
  app.add_option("--budget-ms", options.budget_ms, "device time for each row")->check(CLI::PositiveNumber);
  app.add_option("--filter", options.filter, "only rows whose name contains this");
  app.add_flag("--json", options.json, "one JSON object on stdout; the table goes to stderr");
  CLI11_PARSE(app, argc, argv);
  try {
    basin::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
