// Writes GGUF version 3.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weights/gguf.h"
#include "weights/output.h"

namespace basin::weights {

/// The metadata of a file, in order. A key that is set again keeps its place.
class GgufMetadata {
 public:
  void copy(const GgufEntry& entry);
  void set(const std::string& key, std::uint32_t value);
  void set(const std::string& key, float value);
  void set(const std::string& key, bool value);
  void set(const std::string& key, std::string_view text);
  void set(const std::string& key, const char* text) { set(key, std::string_view(text)); }
  void set(const std::string& key, const std::vector<std::string>& texts);
  void set(const std::string& key, const std::vector<std::int32_t>& values);
  void set(const std::string& key, const std::vector<float>& values);
  void remove(const std::string& key);

  struct Entry {
    std::string key;
    std::string bytes;  // type and value
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void put(const std::string& key, std::string bytes);

  std::vector<Entry> entries_;
};

/// Writes atomically (temporary file in the same directory, fsync, rename), with tensors aligned to 32 bytes. Throws Error(io), and
/// Error(invalid_argument | unsupported) naming what the format cannot hold, before anything is produced.
void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const std::vector<Output>& tensors);

}  // namespace basin::weights
