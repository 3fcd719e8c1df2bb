// GGUF versions 2 and 3: typed metadata and tensors. Hostile until checked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "weights/weights.h"

namespace basin::weights {

/// Scalars keep their kind (all integers widen to int64 or uint64); arrays are homogeneous.
using GgufValue =
    std::variant<std::int64_t, std::uint64_t, double, bool, std::string, std::vector<std::int64_t>,
                 std::vector<double>, std::vector<bool>, std::vector<std::string>>;

/// A metadata entry as it stands in the file: its type and value.
struct GgufEntry {
  std::string key;
  std::span<const std::byte> bytes;
};

struct GgufFile {
  std::shared_ptr<const MappedFile> file;
  std::map<std::string, GgufValue> metadata;
  std::vector<GgufEntry> entries;  // the metadata, in the file's order
  std::map<std::string, Tensor> tensors;
};

/// Throws Error(corrupt | unsupported | not_found | io), naming the file, the key or the tensor.
GgufFile read_gguf(const std::filesystem::path& path);

}  // namespace basin::weights
