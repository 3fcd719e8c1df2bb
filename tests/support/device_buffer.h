// Device memory for tests, with guard bands that show a stray write.
#pragma once

#include <cstddef>
#include <vector>

namespace basin::test {

/// Owns device memory. Contents and guards start as bytes of 0xff, which is NaN in every floating-point type. Every function
/// throws std::runtime_error with CUDA's words when CUDA fails.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;  // absent: data() is null
  explicit DeviceBuffer(std::size_t bytes);
  DeviceBuffer(const void* host, std::size_t bytes);
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.data(), host.size() * sizeof(T)) {}
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const;  // aligned to 256 bytes
  std::size_t bytes() const { return bytes_; }

  void fill(unsigned char byte);
  void upload(const void* host, std::size_t bytes, std::size_t offset = 0);
  void download(void* host, std::size_t bytes, std::size_t offset = 0) const;

  /// Nothing has written into the bands before and behind the contents.
  bool guards_intact() const;

 private:
  void expect_inside(const char* what, std::size_t bytes, std::size_t offset) const;
  unsigned char* at(std::size_t offset) const;

  unsigned char* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Waits for the device; throws std::runtime_error when anything on it has failed.
void synchronize_device();

}  // namespace basin::test
