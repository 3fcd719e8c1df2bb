#include "cli/ceilings.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "base/choose_kernels.h"
#include "cli/ceilings_kernel.h"
#include "cli/interrupt.h"

namespace basin::cli {
namespace {

constexpr int kRepeats = 5;  // the best one counts: a ceiling is what the machine can do
constexpr double kLoopSeconds = 0.05;

std::atomic<float> sink_of_results{0.0f};  // keeps the loops alive

// Seconds of the fastest of kRepeats runs of body(part) on all threads.
double best_seconds(ThreadPool& pool, const std::function<void(std::int64_t part)>& body) {
  double best = 0.0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    throw_if_interrupted();
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(pool.threads(), [&](std::int64_t part, int) { body(part); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = repeat == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

double measure_read(ThreadPool& pool, const CeilingKernels& kernels) {
  constexpr std::int64_t kGrain = 64;  // floats; what kernels.read asks for
  const std::int64_t cache_bytes = std::max<std::int64_t>(::sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  const std::int64_t bytes = std::clamp<std::int64_t>(4 * cache_bytes, 128 << 20, 1 << 30);
  const std::int64_t threads = pool.threads();
  const std::int64_t each = bytes / 4 / threads / kGrain * kGrain;
  std::vector<float> data(static_cast<std::size_t>(each * threads), 1.0f);
  const double seconds = best_seconds(pool, [&](std::int64_t part) {
    sink_of_results.store(kernels.read(data.data() + part * each, each), std::memory_order_relaxed);
  });
  return static_cast<double>(each * threads) * sizeof(float) / seconds;
}

double measure_peak(ThreadPool& pool, const PeakLoop& loop) {
  std::int64_t iterations = 1 << 14;
  while (true) {  // long enough that starting the threads does not count
    const auto body = [&](std::int64_t) {
      sink_of_results.store(loop.run(iterations), std::memory_order_relaxed);
    };
    const double seconds = best_seconds(pool, body);
    if (seconds >= kLoopSeconds) {
      return static_cast<double>(loop.operations) * static_cast<double>(iterations) * pool.threads() /
             seconds;
    }
    iterations *= seconds < kLoopSeconds / 8 ? 8 : 2;
  }
}

}  // namespace

Ceilings measure_ceilings(ThreadPool& pool) {
  const CeilingKernels kernels = choose_kernels([](auto target) { return ceiling_kernels(target); });
  Ceilings ceilings;
  ceilings.read_bytes_per_second = measure_read(pool, kernels);
  ceilings.fp32_flops = measure_peak(pool, kernels.fp32_fma);
  if (kernels.bf16_dot.run != nullptr) ceilings.bf16_flops = measure_peak(pool, kernels.bf16_dot);
  if (kernels.int8_dot.run != nullptr) ceilings.int8_ops = measure_peak(pool, kernels.int8_dot);
  return ceilings;
}

}  // namespace basin::cli
