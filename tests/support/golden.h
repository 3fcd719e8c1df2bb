// Golden files: an independent, small safetensors reader for tests (the weights module has its own).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "basin/base/dtype.h"

namespace basin::test {

struct GoldenTensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  std::int64_t size() const;                   // elements
  std::vector<double> doubles() const;         // any dtype
  std::vector<float> floats() const;           // any dtype
  std::vector<std::int64_t> integers() const;  // integer dtypes only; throws std::runtime_error
};

struct GoldenFile {
  std::string path;
  std::map<std::string, GoldenTensor> tensors;
  std::map<std::string, std::string> metadata;

  bool has(const std::string& name) const { return tensors.count(name) != 0; }
  const GoldenTensor& at(const std::string& name) const;   // throws std::runtime_error naming file and tensor
  const std::string& meta(const std::string& name) const;  // likewise
  std::int64_t meta_int(const std::string& name) const;
  double meta_double(const std::string& name) const;
};

/// Throws std::runtime_error.
GoldenFile read_golden(const std::filesystem::path& path);

/// BASIN_GOLDEN_DIR, or the repository's tests/golden.
std::filesystem::path golden_dir();

/// The .safetensors files of golden_dir()/ops, sorted. Empty when there is no such folder.
std::vector<std::filesystem::path> golden_ops();

/// The folders of golden_dir()/models, sorted. Empty when there is no such folder.
std::vector<std::filesystem::path> golden_models();

}  // namespace basin::test
