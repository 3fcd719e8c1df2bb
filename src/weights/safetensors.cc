// safetensors: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, data.
// The header is read with nlohmann's SAX interface because a DOM would silently merge duplicate names.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "basin/base/error.h"
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
constexpr DTypeName kDTypes[] = {{"F64", DType::f64},   {"F32", DType::f32}, {"F16", DType::f16},
                                 {"BF16", DType::bf16}, {"I64", DType::i64}, {"I32", DType::i32},
                                 {"I16", DType::i16},   {"I8", DType::i8},   {"U8", DType::u8}};

std::optional<DType> parse_dtype(const std::string& text) {
  for (const auto& entry : kDTypes) {
    if (text == entry.text) return entry.dtype;
  }
  return std::nullopt;
}

const char* dtype_text(DType dtype) {
  for (const auto& entry : kDTypes) {
    if (entry.dtype == dtype) return entry.text;
  }
  throw Error(ErrorCode::unsupported, fmt::format("safetensors has no dtype for {}", name(dtype)));
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
                "supported are F64, F32, F16, BF16, I64, I32, I16, I8 and U8");
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

SafetensorsFile read_safetensors(const std::filesystem::path& path) {
  SafetensorsFile result;
  result.file = std::make_shared<MappedFile>(path);
  const std::byte* bytes = result.file->data();
  const std::uint64_t size = result.file->size();
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
  return result;
}

namespace {

// A temporary file beside `path` that vanishes unless it is committed.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path) : path_(path) {
    // Not mkstemp: its files are private whatever the umask says.
    for (int attempt = 0; attempt < 1000; ++attempt) {
      temporary_ = fmt::format("{}.{}.{}", path.string(), ::getpid(), attempt);
      descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ >= 0 || errno != EEXIST) break;
    }
    if (descriptor_ < 0) fail("create a file beside it");
  }
  ~AtomicFile() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
      ::unlink(temporary_.c_str());
    }
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::uint64_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(descriptor_, at, std::min<std::uint64_t>(bytes, 1u << 30));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      at += written;
      bytes -= static_cast<std::uint64_t>(written);
    }
  }

  void commit() {
    if (::fsync(descriptor_) != 0) fail("flush");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
    ::close(descriptor_);
    descriptor_ = -1;
    // The new name must survive a crash too; the file is complete whatever the directory's flush says.
    const auto parent = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
    const int directory = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory >= 0) {
      ::fsync(directory);
      ::close(directory);
    }
  }

 private:
  [[noreturn]] void fail(const char* what) {
    throw Error(ErrorCode::io,
                fmt::format("cannot write {}: {}: {}", path_.string(), what, std::strerror(errno)));
  }

  std::filesystem::path path_;
  std::string temporary_;
  int descriptor_ = -1;
};

// A tensor that the reader would accept: its bytes are what dtype and shape need.
void check_writable(const Tensor& tensor) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::invalid_argument, fmt::format("tensor '{}' {}", tensor.name, what));
  };
  if (tensor.name == kMetadataName) refuse("has the name that safetensors keeps for its metadata");
  dtype_text(tensor.dtype);  // throws for block types
  std::uint64_t bytes = static_cast<std::uint64_t>(block_bytes(tensor.dtype));
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0) refuse(fmt::format("has an extent of {}", extent));
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes))
      refuse("has a shape whose size overflows");
  }
  if (bytes != tensor.bytes)
    refuse(fmt::format("has {} bytes where its dtype and shape need {}", tensor.bytes, bytes));
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataName] = metadata;
  std::uint64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    check_writable(tensor);
    if (header.contains(tensor.name)) {
      throw Error(ErrorCode::invalid_argument, fmt::format("tensor '{}' is given twice", tensor.name));
    }
    header[tensor.name] = {{"dtype", dtype_text(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
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
  for (const Tensor& tensor : tensors) file.write(tensor.data, tensor.bytes);
  file.commit();
}

}  // namespace basin::weights
