#include "attention/cuda/device.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "basin/base/error.h"

namespace basin::attention::cuda {

void expect_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error has been told; the next call must not find it
  throw Error(ErrorCode::internal, fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

Device current_device() {
  static std::mutex mutex;
  static std::map<int, Device> known;
  int ordinal = 0;
  expect_success(cudaGetDevice(&ordinal), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(ordinal); found != known.end()) return found->second;
  int major = 0, minor = 0;
  Device device;
  device.ordinal = ordinal;
  const std::pair<int*, cudaDeviceAttr> wanted[] = {
      {&major, cudaDevAttrComputeCapabilityMajor},
      {&minor, cudaDevAttrComputeCapabilityMinor},
      {&device.multiprocessors, cudaDevAttrMultiProcessorCount}};
  for (const auto& [value, attribute] : wanted)
    expect_success(cudaDeviceGetAttribute(value, attribute, ordinal), "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0) {
    throw Error(ErrorCode::unsupported,
                fmt::format("device {} has compute capability {}.{}; the kernels are for 9.0", ordinal, major,
                            minor));
  }
  known.emplace(ordinal, device);
  return device;
}

void prepare(const sm90::Instance& instance, const Device& device) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> prepared;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<int, const void*> key{device.ordinal, instance.kernel};
  if (prepared.count(key) != 0) return;
  expect_success(cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      instance.shared_bytes),
                 "cudaFuncSetAttribute");
  prepared.insert(key);
}

}  // namespace basin::attention::cuda
