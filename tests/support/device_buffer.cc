#include "support/device_buffer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace basin::test {
namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr int kPoison = 0xff;

void expect_success(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  expect_success(cudaMalloc(&memory, bytes + 2 * kGuardBytes), "cudaMalloc");
  memory_ = static_cast<unsigned char*>(memory);
  expect_success(cudaMemset(memory_, kPoison, bytes + 2 * kGuardBytes), "cudaMemset");
}

DeviceBuffer::DeviceBuffer(const void* host, std::size_t bytes) : DeviceBuffer(bytes) {
  upload(host, bytes);
}

DeviceBuffer::~DeviceBuffer() {
  cudaFree(memory_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void* DeviceBuffer::data() const {
  return memory_ == nullptr ? nullptr : memory_ + kGuardBytes;
}

void DeviceBuffer::fill(unsigned char byte) {
  expect_success(cudaMemset(data(), byte, bytes_), "cudaMemset");
}

void DeviceBuffer::upload(const void* host, std::size_t bytes, std::size_t offset) {
  expect_inside("upload", bytes, offset);
  if (bytes > 0) expect_success(cudaMemcpy(at(offset), host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

void DeviceBuffer::download(void* host, std::size_t bytes, std::size_t offset) const {
  expect_inside("download", bytes, offset);
  if (bytes > 0) expect_success(cudaMemcpy(host, at(offset), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

void DeviceBuffer::expect_inside(const char* what, std::size_t bytes, std::size_t offset) const {
  if (offset > bytes_ || bytes > bytes_ - offset)
    throw std::runtime_error(std::string(what) + " of more bytes than the buffer has");
}

unsigned char* DeviceBuffer::at(std::size_t offset) const {
  return memory_ + kGuardBytes + offset;
}

bool DeviceBuffer::guards_intact() const {
  if (memory_ == nullptr) return true;
  std::vector<unsigned char> guards(2 * kGuardBytes);
  expect_success(cudaMemcpy(guards.data(), memory_, kGuardBytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  expect_success(cudaMemcpy(guards.data() + kGuardBytes, memory_ + kGuardBytes + bytes_, kGuardBytes,
                            cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
  return std::all_of(guards.begin(), guards.end(), [](unsigned char byte) { return byte == kPoison; });
}

void synchronize_device() {
  expect_success(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace basin::test
