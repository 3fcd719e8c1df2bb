// Any bytes either load as safetensors, with every byte of every tensor readable, or give one Error.
#include <algorithm>
#include <cstring>
#include <vector>

#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "weights/weights.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

// The header's length must match or nothing else is looked at: three times in four only the header changes, and its
// length follows.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most,
                                               unsigned seed) {
  std::uint64_t header = 0;
  if (size >= 8) std::memcpy(&header, data, 8);
  if (size < 8 || header > size - 8 || seed % 4 == 0) return LLVMFuzzerMutate(data, size, most);
  const std::vector<std::uint8_t> tail(data + 8 + header, data + size);
  const std::size_t changed = LLVMFuzzerMutate(data + 8, header, most - 8 - tail.size());
  std::copy(tail.begin(), tail.end(), data + 8 + changed);
  const std::uint64_t length = changed;
  std::memcpy(data, &length, 8);
  return 8 + changed + tail.size();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const basin::fuzz::MemoryFile file(data, size);
  try {
    std::uint64_t bytes = 0;
    basin::weights::SafetensorsFile read = basin::weights::read_safetensors(file.path());
    for (const auto& [name, tensor] : read.tensors) {
      basin::fuzz::touch(tensor.data, tensor.bytes);
      bytes += tensor.bytes;
    }
    basin::fuzz::require(bytes <= size);
    basin::weights::expand_f8(read, {2, 3}, "input");
    for (const auto& [name, tensor] : read.tensors) {
      basin::fuzz::require(tensor.dtype != basin::DType::f8_e4m3);
      basin::fuzz::touch(tensor.data, tensor.bytes);
    }
  } catch (const basin::Error&) {
  }
  return 0;
}
