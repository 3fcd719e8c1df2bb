// safetensors: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, data.
// The header is read with nlohmann's SAX interface because a DOM would silently merge duplicate names.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "basin/base/error.h"
#include "weights/atomic_file.h"
#include "weights/map_cached.h"
#include "weights/output.h"
#include "weights/printable.h"
#include "weights/weights.h"

namespace basin::weights {
namespace {

constexpr const char* kMetadataName = "__metadata__";
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as in the reference implementation

struct DTypeName {
  const char* text;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {{"F64", DType::f64},        {"F32", DType::f32}, {"F16", DType::f16},
                                 {"BF16", DType::bf16},      {"I64", DType::i64}, {"I32", DType::i32},
                                 {"I16", DType::i16},        {"I8", DType::i8},   {"U8", DType::u8},
                                 {"F8_E4M3", DType::f8_e4m3}};

std::optional<DType> parse_dtype(const std::string& text) {
  for (const auto& entry : kDTypes) {
    if (text == entry.text) return entry.dtype;
  }
  return std::nullopt;
}

const char* dtype_text(const Output& tensor) {
  for (const auto& entry : kDTypes) {
    if (entry.dtype == tensor.dtype) return entry.text;
  }
  throw Error(ErrorCode::unsupported, fmt::format("tensor '{}' is {}, for which safetensors has no dtype",
                                                  printable(tensor.name), name(tensor.dtype)));
}

/// What the header says of one tensor, before it is checked.
struct Entry {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<std::uint64_t>> shape;
  std::optional<std::vector<std::uint64_t>> offsets;
};

// Accepts exactly the header's grammar and notes the first thing that is not in it.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(std::int64_t value) override {
    return refuse(fmt::format("the negative number {}", value));
  }
  bool number_float(double, const std::string& text) override {
    return refuse("the number " + text.substr(0, 40));
  }
  bool binary(nlohmann::json::binary_t&) override { return refuse("binary data"); }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ != Place::shape && place_ != Place::offsets) return refuse("a number");
    auto& list = place_ == Place::shape ? *entries.back().shape : *entries.back().offsets;
    if (list.size() >= 64) return refuse("more than 64 numbers");
    list.push_back(value);
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata) {
      metadata[key_] = value;
      return true;
    }
    if (place_ != Place::tensor || key_ != "dtype") return refuse("a string");
    entries.back().dtype = value;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::header;
      return true;
    }
    if (place_ != Place::header) return refuse("an object");
    if (key_ == kMetadataName) {
      place_ = Place::metadata;
    } else {
      entries.push_back({key_, {}, {}, {}});
      place_ = Place::tensor;
    }
    keys_.clear();
    return true;
  }

  bool end_object() override {
    place_ = place_ == Place::header ? Place::done : Place::header;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || (key_ != "shape" && key_ != "data_offsets")) return refuse("an array");
    if (key_ == "shape") {
      entries.back().shape.emplace();
      place_ = Place::shape;
    } else {
      entries.back().offsets.emplace();
      place_ = Place::offsets;
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool key(std::string& value) override {
    key_ = value;
    auto& seen = place_ == Place::header ? names_ : keys_;
    if (!seen.insert(value).second) {
      problem = fmt::format("the name '{}' stands twice", printable(value));
      return false;
    }
    if (place_ == Place::tensor && value != "dtype" && value != "shape" && value != "data_offsets") {
      problem = fmt::format("tensor '{}' has the unknown key '{}'", printable(entries.back().name),
                            printable(value));
      return false;
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    if (problem.empty()) problem = fmt::format("the header is not JSON (byte {})", position);
    return false;
  }

  bool complete() const { return place_ == Place::done; }

 private:
  enum class Place { outside, header, metadata, tensor, shape, offsets, done };

  bool refuse(const std::string& what) {
    const bool inside = place_ == Place::tensor || place_ == Place::shape || place_ == Place::offsets;
    const std::string owner = inside ? fmt::format(" of tensor '{}'", printable(entries.back().name)) : "";
    problem = fmt::format("the header has {} at '{}'{}, where the format allows none", what, printable(key_),
                          owner);
    return false;
  }

  Place place_ = Place::outside;
  std::string key_;
  std::set<std::string> names_, keys_;
};

std::uint64_t read_u64(const std::byte* data) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | std::to_integer<std::uint64_t>(data[i]);
  return value;
}

Tensor check_entry(const Entry& entry, const std::byte* data, std::uint64_t data_bytes,
                   const std::string& path) {
  const auto corrupt = [&](const std::string& what) {
    return Error(ErrorCode::corrupt, fmt::format("{}: tensor '{}' {}", path, printable(entry.name), what));
  };
  if (!entry.dtype) throw corrupt("has no dtype");
  if (!entry.shape) throw corrupt("has no shape");
  if (!entry.offsets) throw corrupt("has no data_offsets");
  const auto dtype = parse_dtype(*entry.dtype);
  if (!dtype) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: tensor '{}' has dtype '{}', which is not supported", path,
                            printable(entry.name), printable(*entry.dtype)),
                "supported are F64, F32, F16, BF16, F8_E4M3, I64, I32, I16, I8 and U8");
  }
  if (entry.offsets->size() != 2) throw corrupt("needs two data_offsets");
  const std::uint64_t begin = (*entry.offsets)[0], end = (*entry.offsets)[1];
  if (begin > end || end > data_bytes) {
    throw corrupt(fmt::format(
        "lies at bytes [{}, {}) of {} bytes of data: the file is cut short or its header is wrong", begin,
        end, data_bytes));
  }
  Tensor tensor;
  tensor.name = entry.name;
  tensor.dtype = *dtype;
  std::uint64_t bytes = static_cast<std::uint64_t>(block_bytes(*dtype));
  for (const std::uint64_t extent : *entry.shape) {
    if (extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
        __builtin_mul_overflow(bytes, extent, &bytes)) {
      throw corrupt("has a shape whose size overflows");
    }
    tensor.shape.push_back(static_cast<std::int64_t>(extent));
  }
  if (bytes != end - begin) {
    throw corrupt(fmt::format("has {} bytes where its dtype and shape need {}", end - begin, bytes));
  }
  tensor.data = data + begin;
  tensor.bytes = bytes;
  return tensor;
}

}  // namespace

SafetensorsFile read_safetensors(const std::filesystem::path& path, Reading reading) {
  SafetensorsFile result;
  const auto file = std::make_shared<const MappedFile>(path);
  result.owners.push_back(file);
  const std::byte* bytes = file->data();
  const std::uint64_t size = file->size();
  const std::string where = path.string();
  if (size < 8)
    throw Error(ErrorCode::corrupt,
                fmt::format("{} has {} bytes; a safetensors file has at least 8", where, size));
  const std::uint64_t header_bytes = read_u64(bytes);
  if (header_bytes > kMaxHeaderBytes || header_bytes > size - 8) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{} claims a header of {} bytes in a file of {}", where, header_bytes, size));
  }
  HeaderReader reader;
  const char* header = reinterpret_cast<const char*>(bytes + 8);
  if (!nlohmann::json::sax_parse(header, header + header_bytes, &reader) || !reader.complete()) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: {}", where,
                            reader.problem.empty() ? "the header is not an object" : reader.problem));
  }
  result.metadata = std::move(reader.metadata);

  const std::uint64_t data_bytes = size - 8 - header_bytes;
  std::vector<Tensor> sorted;
  sorted.reserve(reader.entries.size());
  for (const Entry& entry : reader.entries)
    sorted.push_back(check_entry(entry, bytes + 8 + header_bytes, data_bytes, where));
  std::sort(sorted.begin(), sorted.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.data, a.bytes) < std::pair(b.data, b.bytes);
  });
  const std::byte* expected = bytes + 8 + header_bytes;
  for (const Tensor& tensor : sorted) {
    if (tensor.data != expected) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: tensor '{}' {}", where, printable(tensor.name),
                              tensor.data < expected ? "overlaps another one" : "follows a hole"));
    }
    expected += tensor.bytes;
  }
  if (expected != bytes + size) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{} has {} bytes after its last tensor", where, bytes + size - expected));
  }
  for (Tensor& tensor : sorted) result.tensors.emplace(tensor.name, tensor);
  if (reading == Reading::whole) map_cached(*file);
  return result;
}

namespace {}  // namespace

void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<Output> outputs;
  for (const Tensor& tensor : tensors) {
    outputs.push_back(as_stored(tensor));
    if (const std::uint64_t needed = byte_size(outputs.back()); tensor.bytes != needed) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("tensor '{}' has {} bytes where its dtype and shape need {}", tensor.name,
                              tensor.bytes, needed));
    }
  }
  write_safetensors(path, outputs, metadata);
}

void write_safetensors(const std::filesystem::path& path, const std::vector<Output>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataName] = metadata;
  std::uint64_t offset = 0;
  for (const Output& tensor : tensors) {
    if (tensor.name == kMetadataName) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("tensor '{}' has the name that safetensors keeps for its metadata", tensor.name));
    }
    if (header.contains(tensor.name)) {
      throw Error(ErrorCode::invalid_argument, fmt::format("tensor '{}' is given twice", tensor.name));
    }
    const char* dtype = dtype_text(tensor);
    const std::uint64_t end = offset + byte_size(tensor);
    header[tensor.name] = {{"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::type_error&) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("cannot write {}: a name or its metadata is not UTF-8", path.string()));
  }
  text.append((8 - text.size() % 8) % 8, ' ');  // data starts aligned

  AtomicFile file(path);
  char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  file.write(length, sizeof length);
  file.write(text.data(), text.size());
  for (const Output& tensor : tensors)
    produce(tensor, [&](const void* data, std::uint64_t bytes) { file.write(data, bytes); });
  file.commit();
}

}  // namespace basin::weights
