// A tensor on its way into a file: what the header says of it, and who makes its bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "weights/weights.h"

namespace basin::weights {

using WriteBytes = std::function<void(const void* data, std::uint64_t bytes)>;

struct Output {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // row-major, outermost first
  /// Hands over all bytes of the tensor, in order; exactly what dtype and shape need.
  std::function<void(const WriteBytes& write)> produce;
};

/// What dtype and shape need, as the readers count it. Throws Error(invalid_argument) naming the tensor: an extent below zero, a
/// size that overflows, rows that are no whole number of blocks.
std::uint64_t byte_size(const Output& tensor);

/// `tensor` as it is.
Output as_stored(const Tensor& tensor);

/// Calls tensor.produce. Throws Error(internal) when it hands over another number of bytes than the header promised.
void produce(const Output& tensor, const WriteBytes& write);

/// Writes atomically (temporary file in the same directory, fsync, rename). Throws Error(io), and
/// Error(invalid_argument | unsupported) for tensors that the format cannot hold, before anything is produced.
void write_safetensors(const std::filesystem::path& path, const std::vector<Output>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace basin::weights
