#include "weights/gguf_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <set>
#include <type_traits>

#include "basin/base/error.h"
#include "weights/atomic_file.h"
#include "weights/gguf_types.h"
#include "weights/printable.h"

namespace basin::weights {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is little-endian");

constexpr std::size_t kMostDimensions = 4;
const std::string kAlignmentKey = "general.alignment";

template <typename T>
void append(std::string& bytes, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_text(std::string& bytes, std::string_view text) {
  append<std::uint64_t>(bytes, text.size());
  bytes.append(text);
}

template <typename T>
std::string scalar(std::uint32_t type, T value) {
  std::string bytes;
  append(bytes, type);
  append(bytes, value);
  return bytes;
}

std::string array_head(std::uint32_t type, std::size_t count) {
  std::string bytes;
  append<std::uint32_t>(bytes, kArray);
  append(bytes, type);
  append<std::uint64_t>(bytes, count);
  return bytes;
}

std::uint32_t type_id(const Output& tensor) {
  for (const GgufTensorType& known : kGgufTensorTypes) {
    if (known.dtype == tensor.dtype) return known.id;
  }
  throw Error(ErrorCode::unsupported, fmt::format("tensor '{}' is {}, for which GGUF has no type",
                                                  printable(tensor.name), name(tensor.dtype)));
}

std::uint64_t padding(std::uint64_t position) {
  return (kGgufAlignment - position % kGgufAlignment) % kGgufAlignment;
}

}  // namespace

void GgufMetadata::put(const std::string& key, std::string bytes) {
  const auto same = [&](const Entry& entry) { return entry.key == key; };
  const auto it = std::find_if(entries_.begin(), entries_.end(), same);
  if (it != entries_.end()) {
    it->bytes = std::move(bytes);
  } else {
    entries_.push_back({key, std::move(bytes)});
  }
}

void GgufMetadata::remove(const std::string& key) {
  std::erase_if(entries_, [&](const Entry& entry) { return entry.key == key; });
}

void GgufMetadata::copy(const GgufEntry& entry) {
  put(entry.key, {reinterpret_cast<const char*>(entry.bytes.data()), entry.bytes.size()});
}

void GgufMetadata::set(const std::string& key, std::uint32_t value) {
  put(key, scalar(kU32, value));
}

void GgufMetadata::set(const std::string& key, float value) {
  put(key, scalar(kF32, value));
}

void GgufMetadata::set(const std::string& key, bool value) {
  put(key, scalar(kBool, static_cast<std::uint8_t>(value)));
}

void GgufMetadata::set(const std::string& key, std::string_view text) {
  std::string bytes;
  append<std::uint32_t>(bytes, kString);
  append_text(bytes, text);
  put(key, std::move(bytes));
}

void GgufMetadata::set(const std::string& key, const std::vector<std::string>& texts) {
  std::string bytes = array_head(kString, texts.size());
  for (const std::string& text : texts) append_text(bytes, text);
  put(key, std::move(bytes));
}

void GgufMetadata::set(const std::string& key, const std::vector<std::int32_t>& values) {
  std::string bytes = array_head(kI32, values.size());
  for (const std::int32_t value : values) append(bytes, value);
  put(key, std::move(bytes));
}

void GgufMetadata::set(const std::string& key, const std::vector<float>& values) {
  std::string bytes = array_head(kF32, values.size());
  for (const float value : values) append(bytes, value);
  put(key, std::move(bytes));
}

void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const std::vector<Output>& tensors) {
  std::string header;
  append(header, kGgufMagic);
  append<std::uint32_t>(header, 3);
  append<std::uint64_t>(header, tensors.size());
  append<std::uint64_t>(header, metadata.entries().size());
  for (const GgufMetadata::Entry& entry : metadata.entries()) {
    if (entry.key == kAlignmentKey)
      throw Error(ErrorCode::invalid_argument, kAlignmentKey + " is the writer's own");
    append_text(header, entry.key);
    header += entry.bytes;
  }
  std::uint64_t offset = 0;
  std::set<std::string> names;
  for (const Output& tensor : tensors) {
    const auto refuse = [&](const std::string& what) {
      throw Error(ErrorCode::invalid_argument, fmt::format("tensor '{}' {}", printable(tensor.name), what));
    };
    if (!names.insert(tensor.name).second) refuse("is given twice");
    if (tensor.shape.size() > kMostDimensions)
      refuse(fmt::format("has {} dimensions; GGUF has at most {}", tensor.shape.size(), kMostDimensions));
    if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end())
      refuse("has no elements");
    append_text(header, tensor.name);
    append(header, static_cast<std::uint32_t>(tensor.shape.size()));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent)  // innermost first
      append(header, static_cast<std::uint64_t>(*extent));
    append(header, type_id(tensor));
    append(header, offset);
    offset += byte_size(tensor);
    offset += padding(offset);
  }
  header.append(padding(header.size()), '\0');

  AtomicFile file(path);
  file.write(header.data(), header.size());
  for (const Output& tensor : tensors) {
    produce(tensor, [&](const void* data, std::uint64_t bytes) { file.write(data, bytes); });
    const std::string zeros(padding(byte_size(tensor)), '\0');
    file.write(zeros.data(), zeros.size());
  }
  file.commit();
}

}  // namespace basin::weights
