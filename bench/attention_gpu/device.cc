#include "attention_gpu/device.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "basin/base/dtype.h"

namespace basin::bench {
namespace {

constexpr std::size_t kFlushBytes = std::size_t{256} << 20;  // five times the L2

class Event {
 public:
  Event() { expect_success(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record() { expect_success(cudaEventRecord(event_), "cudaEventRecord"); }
  double ms_since(const Event& begin) const {
    float ms = 0;
    expect_success(cudaEventElapsedTime(&ms, begin.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

void synchronize() {
  expect_success(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace

void expect_success(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

DeviceMemory allocate(std::size_t bytes) {
  void* memory = nullptr;
  expect_success(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)), "cudaMalloc");
  return DeviceMemory(memory);
}

DeviceMemory allocate_copy(const void* host, std::size_t bytes) {
  DeviceMemory memory = allocate(bytes);
  expect_success(cudaMemcpy(memory.get(), host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

DeviceMemory allocate_noise(std::size_t bytes) {
  // Odd, so that repetitions do not line up with rows.
  constexpr std::size_t kPattern = (std::size_t{4} << 20) + 3;
  std::vector<std::uint16_t> pattern(kPattern);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::uint16_t& x : pattern) x = to_bf16(normal(random)).bits;
  DeviceMemory memory = allocate(bytes);
  auto* to = static_cast<unsigned char*>(memory.get());
  std::size_t done = std::min(bytes, pattern.size() * sizeof(std::uint16_t));
  expect_success(cudaMemcpy(to, pattern.data(), done, cudaMemcpyHostToDevice), "cudaMemcpy");
  for (; done < bytes; done *= 2) {
    expect_success(cudaMemcpy(to + done, to, std::min(done, bytes - done), cudaMemcpyDeviceToDevice),
                   "cudaMemcpy");
  }
  return memory;
}

double median_ms(const std::function<void()>& launch, double budget_ms) {
  constexpr int kLeast = 11, kMost = 201;
  static const DeviceMemory flush = allocate(kFlushBytes);
  // The host runs ahead while the flush takes its time, so the launch itself is not measured.
  const auto measure = [&](int count) {
    std::vector<Event> begins(static_cast<std::size_t>(count)), ends(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < begins.size(); ++i) {
      expect_success(cudaMemsetAsync(flush.get(), 0, kFlushBytes), "cudaMemsetAsync");
      begins[i].record();
      launch();
      ends[i].record();
    }
    synchronize();
    std::vector<double> times;
    for (std::size_t i = 0; i < begins.size(); ++i) times.push_back(ends[i].ms_since(begins[i]));
    std::nth_element(times.begin(), times.begin() + count / 2, times.end());
    return times[static_cast<std::size_t>(count / 2)];
  };
  constexpr double kFlushMs = 0.1;
  const double first = measure(3);
  return measure(std::clamp(static_cast<int>(budget_ms / (first + kFlushMs)) | 1, kLeast, kMost));
}

double copy_bandwidth() {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  const DeviceMemory from = allocate_noise(kBytes), to = allocate(kBytes);
  const double ms = median_ms(
      [&] {
        expect_success(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice),
                       "cudaMemcpyAsync");
      },
      100);
  return 2.0 * static_cast<double>(kBytes) / (ms * 1e-3);
}

}  // namespace basin::bench
