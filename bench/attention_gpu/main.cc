// The speed table of attention on the GPU, with cold caches: milliseconds, TFLOP/s or TB/s, and the share of what the same
// device copies and multiplies in the same run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "attention_gpu/append_work.h"
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

// The table as text, and its rows as JSON.
class Table {
 public:
  explicit Table(const Options& options) : options_(options), text_(options.json ? stderr : stdout) {
    report_ = describe_device();
    copy_ = copy_bandwidth();
    report_["copy_tb_s"] = copy_ * 1e-12;
    report_["gemm_tflops"] = options.gemm_tflops;
    report_["rows"] = nlohmann::json::array();
    fmt::print(text_, "{}, {} SMs; copy {:.2f} TB/s; GEMM {}\n", report_["device"].get<std::string>(),
               report_["multiprocessors"].get<int>(), copy_ * 1e-12,
               options.gemm_tflops > 0 ? fmt::format("{:.0f} TFLOP/s", options.gemm_tflops)
                                       : "not given (--gemm-tflops)");
    fmt::print(text_, "{:<52} {:>9} {:>9} {:>8} {:>8} {:>7}\n", "work (bf16, 8 key heads, sink_logit)", "ms",
               "TFLOP/s", "TB/s", "% GEMM", "% copy");
  }

  void add_refused(const std::string& name, const std::string& reason) {
    fmt::print(text_, "{:<52} not run: {}\n", name, reason);
    report_["rows"].push_back({{"work", name}, {"refused", reason}});
  }

  void add(const std::string& name, double ms, const Cost& cost) {
    const double tflops = cost.flops / ms * 1e-9, tb_s = cost.bytes / ms * 1e-9;
    nlohmann::json row = {
        {"work", name}, {"ms", ms}, {"tb_s", tb_s}, {"percent_of_copy", 1e14 * tb_s / copy_}};
    std::string flops = "-", gemm = "-";
    if (cost.flops > 0) {
      row["tflops"] = tflops;
      flops = fmt::format("{:.1f}", tflops);
    }
    if (cost.flops > 0 && options_.gemm_tflops > 0) {
      row["percent_of_gemm"] = 100 * tflops / options_.gemm_tflops;
      gemm = fmt::format("{:.1f}", 100 * tflops / options_.gemm_tflops);
    }
    fmt::print(text_, "{:<52} {:>9.4f} {:>9} {:>8.3f} {:>8} {:>7.1f}\n", name, ms, flops, tb_s, gemm,
               1e14 * tb_s / copy_);
    std::fflush(text_);
    report_["rows"].push_back(row);
  }

  void print_json() const {
    if (options_.json) fmt::print("{}\n", report_.dump(2));
  }

 private:
  const Options& options_;
  std::FILE* text_;
  nlohmann::json report_;
  double copy_ = 0;  // bytes per second
};

void run(const Options& options) {
  std::vector<Work> works = all_work();
  std::vector<AppendWork> appends = all_append_work();
  const auto unwanted = [&](const auto& work) { return work.name.find(options.filter) == std::string::npos; };
  std::erase_if(works, unwanted);
  std::erase_if(appends, unwanted);
  std::size_t noise_bytes = 0;
  for (const Work& work : works) noise_bytes = std::max(noise_bytes, Prepared::noise_bytes(work));
  for (const AppendWork& work : appends) noise_bytes = std::max(noise_bytes, work.memory_bytes());

  Table table(options);
  const DeviceMemory noise = allocate_noise(noise_bytes);
  for (const Work& work : works) {
    const Prepared prepared(work, noise, noise_bytes);
    if (const std::string reason = prepared.refusal(); !reason.empty())
      table.add_refused(work.name, reason);
    else
      table.add(work.name, median_ms([&] { prepared.launch(); }, options.budget_ms), cost_of(work));
  }
  for (const AppendWork& work : appends) {
    const PreparedAppend prepared(work, noise);
    table.add(work.name, median_ms([&] { prepared.launch(); }, options.budget_ms),
              {.flops = 0, .bytes = work.bytes()});
  }
  table.print_json();
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
