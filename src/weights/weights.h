// A checkpoint as a table of named tensors over mapped files. Formats differ, this view does not.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "basin/base/dtype.h"

namespace basin::weights {

/// One tensor of a file. `data` points into a mapping that lives as long as the Checkpoint.
struct Tensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // row-major, outermost first, also for GGUF
  const std::byte* data = nullptr;  // any alignment
  std::uint64_t bytes = 0;
};

/// A read-only mapped file. Throws Error(not_found | io). The mapping shares the file's pages: whoever shortens the
/// file in place afterwards makes reads fault (SIGBUS); replacing it by rename is safe.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

/// Throws Error(not_found) when there is nothing at `path`, Error(io) with the system's reason when it cannot be told.
void require_exists(const std::filesystem::path& path);

/// safetensors: header checked in full (length, JSON, dtype, shape x dtype = range, overlap, holes, duplicate
/// names) before anything is returned. A tensor of a dtype that DType lacks (F8_E5M2, ...) refuses the whole file, used
/// or not: every tensor is consumed or refused by name. Throws Error(corrupt | unsupported | not_found | io) naming the
/// file and the tensor.
struct SafetensorsFile {
  std::vector<std::shared_ptr<const void>> owners;  // of what the tensors point into
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};
/// How a file will be read: all of it, so what the page cache holds of it may be mapped at once, or a part at a time.
enum class Reading { whole, parts };
SafetensorsFile read_safetensors(const std::filesystem::path& path, Reading reading = Reading::whole);

/// The shards that a model.safetensors.index.json lists, as one file; their metadata is left out. A shard lies beside the index.
/// Throws Error(corrupt | not_found | io | unsupported) naming the index and the shard or tensor: a shard that is missing, a
/// name that leads elsewhere, a tensor that is in another shard than listed, in several, or not listed.
SafetensorsFile read_safetensors_index(const std::filesystem::path& index);

/// A block of a matrix of F8_E4M3 that shares one scale.
struct F8Block {
  std::int64_t rows = 128, columns = 128;
};

/// Replaces every F8_E4M3 matrix NAME [rows, columns] and its scales NAME_scale_inv (F32, one for each block, the last ones cut)
/// by NAME in bf16: value times scale, rounded to nearest even. Throws Error(corrupt | unsupported) naming the tensor: scales
/// that are missing, of another shape, or of nothing.
void expand_f8(SafetensorsFile& file, F8Block block, const std::string& where);

/// Writes atomically (temporary file in the same directory, fsync, rename). Throws Error(io), and
/// Error(invalid_argument | unsupported) for tensors that the format cannot hold.
void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace basin::weights
