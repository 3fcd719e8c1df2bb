// Device memory, and how long things take on the device with cold caches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace basin::bench {

/// Throws std::runtime_error with CUDA's words.
void expect_success(cudaError_t status, const char* what);

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, Free>;

DeviceMemory allocate(std::size_t bytes);
/// The whole of it is bf16 (or f16) noise of the size of activations: what numbers are multiplied decides the power that
/// it takes, and so the clock.
DeviceMemory allocate_noise(std::size_t bytes);
DeviceMemory allocate_copy(const void* host, std::size_t bytes);

/// Median milliseconds of `launch` on the default stream, when no cache holds anything of use.
double median_ms(const std::function<void()>& launch, double budget_ms);

/// Bytes read and written per second by a device-to-device copy.
double copy_bandwidth();

}  // namespace basin::bench
