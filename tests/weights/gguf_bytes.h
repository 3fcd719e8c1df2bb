// GGUF files made of bytes, well-formed unless the test says otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weights/files.h"

namespace basin::test {

inline std::string u32(std::uint32_t value) {
  return little_endian(value);
}
inline std::string u64(std::uint64_t value) {
  return little_endian(value);
}
inline std::string gguf_string(const std::string& text) {
  return u64(text.size()) + text;
}
/// A metadata entry: key, type and the bytes of its value.
inline std::string gguf_key(const std::string& key, std::uint32_t type, const std::string& value) {
  return gguf_string(key) + u32(type) + value;
}
inline std::string gguf_array(const std::string& key, std::uint32_t type, std::uint64_t count,
                              const std::string& values) {
  return gguf_key(key, 9, u32(type) + u64(count) + values);
}
/// `dimensions`: innermost first, as the format has them.
inline std::string gguf_tensor(const std::string& name, const std::vector<std::uint64_t>& dimensions,
                               std::uint32_t type, std::uint64_t offset) {
  std::string bytes = gguf_string(name) + u32(static_cast<std::uint32_t>(dimensions.size()));
  for (const std::uint64_t extent : dimensions) bytes += u64(extent);
  return bytes + u32(type) + u64(offset);
}

struct GgufBytes {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::vector<std::string> metadata;
  std::vector<std::string> tensors;
  std::string data;
  std::size_t alignment = 32;

  std::string bytes() const {
    std::string out = magic + u32(version) + u64(tensors.size()) + u64(metadata.size());
    for (const std::string& entry : metadata) out += entry;
    for (const std::string& entry : tensors) out += entry;
    if (!tensors.empty()) out.resize((out.size() + alignment - 1) / alignment * alignment, '\0');
    return out + data;
  }
};

}  // namespace basin::test
