// NumPy's array files: .npy read and written, .npz (a zip of them, stored or deflated, zip64 included) likewise.
// What is read is hostile: every length, offset and checksum is checked before it is used.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "basin/base/dtype.h"
#include "weights/weights.h"

namespace basin::probe {

/// A C-ordered array in little-endian bytes. `data` has any alignment and lives as long as `owner`.
struct Array {
  DType dtype = DType::f32;  // f64, f32, f16, i64, i32, i16, i8 or u8
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;
  std::shared_ptr<const void> owner;
  bool mapped = false;  // `data` lies in a mapped file

  std::int64_t elements() const;
};

/// Gives pages of a mapped file back to the system; reading them again reads the file. What is read of a file larger than
/// memory does not stay there. Never for memory that is not such a mapping.
void release_pages(const std::byte* begin, std::uint64_t bytes);

/// A .npy file in memory. Throws Error(corrupt | unsupported).
Array parse_npy(std::span<const std::byte> bytes, std::shared_ptr<const void> owner);

/// The header of a .npy file.
std::string npy_header(DType dtype, std::span<const std::int64_t> shape);

class NpzFile {
 public:
  /// Reads the directory. Throws Error(not_found | io | corrupt | unsupported) naming the file.
  explicit NpzFile(const std::filesystem::path& path);

  /// Sorted, without `.npy`.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return entries_.contains(name); }
  /// Throws Error(not_found | corrupt | unsupported) naming the file and the array.
  Array read(const std::string& name) const;

 private:
  friend class NpzWriter;
  struct Entry {
    std::uint64_t offset, packed_bytes, bytes;
    std::uint32_t checksum;
    bool deflated;
  };
  const Entry& entry(const std::string& name) const;
  Array read_entry(const Entry& entry) const;

  std::string path_;
  std::shared_ptr<const weights::MappedFile> file_;
  std::map<std::string, Entry> entries_;
};

/// Writes a .npz that appears only when it is complete.
class NpzWriter {
 public:
  /// Throws Error(io).
  explicit NpzWriter(const std::filesystem::path& path);
  ~NpzWriter();  // removes the temporary file unless finish() ran
  NpzWriter(const NpzWriter&) = delete;
  NpzWriter& operator=(const NpzWriter&) = delete;

  void add(const std::string& name, DType dtype, std::span<const std::int64_t> shape, const void* data);
  void add(const std::string& name, std::span<const std::int64_t> shape, std::span<const float> values);
  void add(const std::string& name, std::span<const std::int64_t> shape,
           std::span<const std::int32_t> values);
  void add(const std::string& name, std::span<const std::int64_t> values);
  /// The packed bytes of another file's array, unread. Throws Error(not_found | io).
  void copy(const std::string& name, const NpzFile& from, const std::string& from_name);
  void finish();

 private:
  struct Entry;
  void write(const void* data, std::size_t bytes);
  void write_local(const Entry& entry);

  std::filesystem::path path_;
  std::string temporary_;
  std::FILE* file_ = nullptr;
  std::uint64_t written_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace basin::probe
