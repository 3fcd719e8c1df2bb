#include "weights/output.h"

#include <fmt/format.h>

#include "basin/base/error.h"
#include "weights/printable.h"

namespace basin::weights {

std::uint64_t byte_size(const Output& tensor) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::invalid_argument, fmt::format("tensor '{}' {}", printable(tensor.name), what));
  };
  const std::int64_t block = block_elements(tensor.dtype);
  if (block > 1 && (tensor.shape.empty() || tensor.shape.back() % block != 0)) {
    refuse(fmt::format("has rows of {} elements, which are no whole blocks of {} ({})",
                       tensor.shape.empty() ? 1 : tensor.shape.back(), block, name(tensor.dtype)));
  }
  auto bytes = static_cast<std::uint64_t>(block_bytes(tensor.dtype));
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    const std::int64_t extent = i + 1 == tensor.shape.size() ? tensor.shape[i] / block : tensor.shape[i];
    if (tensor.shape[i] < 0) refuse(fmt::format("has an extent of {}", tensor.shape[i]));
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes))
      refuse("has a shape whose size overflows");
  }
  return bytes;
}

Output as_stored(const Tensor& tensor) {
  return {tensor.name, tensor.dtype, tensor.shape,
          [data = tensor.data, bytes = tensor.bytes](const WriteBytes& write) { write(data, bytes); }};
}

void produce(const Output& tensor, const WriteBytes& write) {
  std::uint64_t written = 0;
  tensor.produce([&](const void* data, std::uint64_t bytes) {
    write(data, bytes);
    written += bytes;
  });
  if (written != byte_size(tensor)) {
    throw Error(ErrorCode::internal, fmt::format("tensor '{}' came with {} bytes instead of {}", tensor.name,
                                                 written, byte_size(tensor)));
  }
}

}  // namespace basin::weights
