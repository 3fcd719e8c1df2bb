// GGUF: magic, version, counts, typed metadata, tensor table, aligned data. Every count is checked against the bytes
// that are left before anything is allocated, so a file cannot ask for more memory than it has bytes.
#include "weights/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "basin/base/error.h"
#include "weights/gguf_types.h"
#include "weights/printable.h"

namespace basin::weights {
namespace {

class Reader {
 public:
  Reader(const std::byte* data, std::uint64_t size, std::string path)
      : data_(data), size_(size), path_(std::move(path)) {}

  std::uint64_t position() const { return position_; }
  std::uint64_t left() const { return size_ - position_; }

  template <typename T>
  T number(const char* what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, data_ + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  std::string string(const char* what) {
    const auto length = number<std::uint64_t>(what);
    need(length, what);
    std::string value(reinterpret_cast<const char*>(data_ + position_), length);
    position_ += length;
    return value;
  }

  void need(std::uint64_t bytes, const char* what) const {
    if (bytes > left()) {
      throw corrupt(fmt::format("ends inside {}{} (byte {} of {})", what, context_, position_, size_));
    }
  }

  /// What the errors to come lie in, such as " in 'general.name'"; empty outside of keys and tensors.
  void inside(std::string context) { context_ = std::move(context); }
  const std::string& context() const { return context_; }

  Error corrupt(const std::string& what) const {
    return Error(ErrorCode::corrupt, fmt::format("{} {}", path_, what),
                 "the file is cut short or damaged; fetch it again");
  }

  Error unsupported(const std::string& what, const std::string& hint = {}) const {
    return Error(ErrorCode::unsupported, fmt::format("{} {}", path_, what), hint);
  }

 private:
  const std::byte* data_;
  std::uint64_t size_;
  std::uint64_t position_ = 0;
  std::string path_, context_;
};

std::uint64_t element_bytes(std::uint32_t type) {
  switch (type) {
    case kU8:
    case kI8:
    case kBool:
      return 1;
    case kU16:
    case kI16:
      return 2;
    case kU32:
    case kI32:
    case kF32:
      return 4;
    case kU64:
    case kI64:
    case kF64:
      return 8;
    case kString:
      return 8;  // at least its length
    default:
      return 0;
  }
}

bool read_bool(Reader& in) {
  const auto value = in.number<std::uint8_t>("a boolean");
  if (value > 1) throw in.corrupt(fmt::format("has a boolean of value {}{}", value, in.context()));
  return value == 1;
}

std::int64_t read_integer(Reader& in, std::uint32_t type) {
  switch (type) {
    case kU8:
      return in.number<std::uint8_t>("metadata");
    case kI8:
      return in.number<std::int8_t>("metadata");
    case kU16:
      return in.number<std::uint16_t>("metadata");
    case kI16:
      return in.number<std::int16_t>("metadata");
    case kU32:
      return in.number<std::uint32_t>("metadata");
    case kI32:
      return in.number<std::int32_t>("metadata");
    default:
      return in.number<std::int64_t>("metadata");
  }
}

double read_float(Reader& in, std::uint32_t type) {
  if (type == kF32) return static_cast<double>(in.number<float>("metadata"));
  return in.number<double>("metadata");
}

GgufValue read_array(Reader& in, const std::string& key) {
  const auto type = in.number<std::uint32_t>("an array");
  const auto count = in.number<std::uint64_t>("an array");
  const std::uint64_t each = element_bytes(type);
  if (each == 0) {
    throw in.unsupported(
        fmt::format("has an array of type {} in '{}'; nested and unknown arrays are not supported", type,
                    printable(key)));
  }
  if (count > in.left() / each) {
    throw in.corrupt(
        fmt::format("claims {} elements in '{}', more than it has bytes", count, printable(key)));
  }
  const auto fill = [&](auto list, auto read) {
    list.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) list.push_back(read());
    return GgufValue(std::move(list));
  };
  switch (type) {
    case kString:
      return fill(std::vector<std::string>{}, [&] { return in.string("a string of an array"); });
    case kBool:
      return fill(std::vector<bool>{}, [&] { return read_bool(in); });
    case kF32:
    case kF64:
      return fill(std::vector<double>{}, [&] { return read_float(in, type); });
    case kU64:
      return fill(std::vector<std::int64_t>{}, [&] {
        const auto value = in.number<std::uint64_t>("an array");
        if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
          throw in.unsupported(fmt::format("has the value {} in '{}', beyond int64", value, printable(key)));
        }
        return static_cast<std::int64_t>(value);
      });
    default:
      return fill(std::vector<std::int64_t>{}, [&] { return read_integer(in, type); });
  }
}

GgufValue read_value(Reader& in, const std::string& key) {
  const auto type = in.number<std::uint32_t>("metadata");
  switch (type) {
    case kString:
      return in.string("a string");
    case kBool:
      return read_bool(in);
    case kF32:
    case kF64:
      return read_float(in, type);
    case kU64:
      return in.number<std::uint64_t>("metadata");
    case kArray:
      return read_array(in, key);
    case kU8:
    case kI8:
    case kU16:
    case kI16:
    case kU32:
    case kI32:
    case kI64:
      return read_integer(in, type);
    default:
      throw in.corrupt(fmt::format("has the unknown metadata type {} in '{}'", type, printable(key)));
  }
}

DType tensor_dtype(Reader& in, std::uint32_t type, const std::string& tensor) {
  std::string text = fmt::format("{} (unknown)", type);
  for (const GgufTensorType& known : kGgufTensorTypes) {
    if (known.id != type) continue;
    if (known.dtype) return *known.dtype;
    text = known.text;
  }
  throw in.unsupported(
      fmt::format("stores tensor '{}' as {}, which is not supported", printable(tensor), text),
      "supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K and MXFP4");
}

/// A tensor and where the file says it lies, relative to the data section.
struct Placed {
  Tensor tensor;
  std::uint64_t offset = 0;
};

Placed read_tensor_info(Reader& in) {
  Placed placed;
  Tensor& tensor = placed.tensor;
  in.inside("");
  tensor.name = in.string("a tensor's name");
  in.inside(fmt::format(" of '{}'", printable(tensor.name)));
  const auto rank = in.number<std::uint32_t>("a tensor's shape");
  if (rank > 4)
    throw in.corrupt(
        fmt::format("gives tensor '{}' {} dimensions; allowed are 0 to 4", printable(tensor.name), rank));
  for (std::uint32_t i = 0; i < rank; ++i) {
    const auto extent = in.number<std::uint64_t>("a tensor's shape");
    if (extent == 0 || extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      throw in.corrupt(fmt::format("gives tensor '{}' a dimension of {}", printable(tensor.name), extent));
    }
    tensor.shape.push_back(static_cast<std::int64_t>(extent));
  }
  std::reverse(tensor.shape.begin(), tensor.shape.end());  // GGUF lists the innermost first
  tensor.dtype = tensor_dtype(in, in.number<std::uint32_t>("a tensor's type"), tensor.name);
  placed.offset = in.number<std::uint64_t>("a tensor's offset");

  const std::int64_t row = tensor.shape.empty() ? 1 : tensor.shape.back();
  const std::int64_t block = block_elements(tensor.dtype);
  if (row % block != 0) {
    throw in.corrupt(fmt::format("gives tensor '{}' rows of {} elements, not a multiple of {}'s block of {}",
                                 printable(tensor.name), row, name(tensor.dtype), block));
  }
  std::uint64_t bytes = static_cast<std::uint64_t>(row / block);
  bool overflow =
      __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(block_bytes(tensor.dtype)), &bytes);
  for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) {
    overflow = overflow || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(tensor.shape[i]), &bytes);
  }
  if (overflow)
    throw in.corrupt(fmt::format("gives tensor '{}' a size that overflows", printable(tensor.name)));
  tensor.bytes = bytes;
  return placed;
}

std::uint64_t alignment(Reader& in, const GgufFile& file) {
  const auto it = file.metadata.find("general.alignment");
  if (it == file.metadata.end()) return kGgufAlignment;
  const auto* value = std::get_if<std::int64_t>(&it->second);
  if (value == nullptr || *value <= 0 || *value > (1 << 20) ||
      !std::has_single_bit(static_cast<std::uint64_t>(*value))) {
    throw in.corrupt("has a general.alignment that is not a power of two up to 1048576");
  }
  return static_cast<std::uint64_t>(*value);
}

}  // namespace

GgufFile read_gguf(const std::filesystem::path& path) {
  static_assert(std::endian::native == std::endian::little, "GGUF is read in place");
  GgufFile result;
  result.file = std::make_shared<MappedFile>(path);
  Reader in(result.file->data(), result.file->size(), path.string());
  if (in.number<std::uint32_t>("its magic") != kGgufMagic)
    throw in.corrupt("is not a GGUF file (its magic is wrong)");
  const auto version = in.number<std::uint32_t>("its version");
  if (version != 2 && version != 3) {
    const bool swapped = version != 0 && __builtin_bswap32(version) <= 3;
    throw in.unsupported(swapped ? std::string("is a big-endian GGUF file, which is not supported")
                                 : fmt::format("is GGUF version {}; supported are 2 and 3", version));
  }
  const auto tensor_count = in.number<std::uint64_t>("its counts");
  const auto metadata_count = in.number<std::uint64_t>("its counts");
  // A key takes at least 13 bytes and a tensor 24.
  if (metadata_count > in.left() / 13 || tensor_count > in.left() / 24) {
    throw in.corrupt(
        fmt::format("claims {} keys and {} tensors, more than it has bytes", metadata_count, tensor_count));
  }
  for (std::uint64_t i = 0; i < metadata_count; ++i) {
    in.inside("");
    std::string key = in.string("a metadata key");
    in.inside(fmt::format(" in '{}'", printable(key)));
    const std::uint64_t begin = in.position();
    GgufValue value = read_value(in, key);
    result.entries.push_back({key, {result.file->data() + begin, in.position() - begin}});
    if (!result.metadata.emplace(key, std::move(value)).second) {
      throw in.corrupt(fmt::format("has the metadata key '{}' twice", printable(key)));
    }
  }
  std::vector<Placed> placed;
  for (std::uint64_t i = 0; i < tensor_count; ++i) placed.push_back(read_tensor_info(in));

  const std::uint64_t align = alignment(in, result);
  const std::uint64_t data_begin = (in.position() + align - 1) / align * align;
  if (tensor_count > 0 && data_begin > result.file->size()) throw in.corrupt("ends before its tensors");
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
  std::uint64_t end = 0;
  for (Placed& p : placed) {
    const std::uint64_t room = result.file->size() - data_begin;
    if (p.offset % align != 0)
      throw in.corrupt(fmt::format("has tensor '{}' at an unaligned offset", printable(p.tensor.name)));
    if (p.offset > room || p.tensor.bytes > room - p.offset) {
      throw in.corrupt(fmt::format("ends inside tensor '{}'", printable(p.tensor.name)));
    }
    if (p.offset < end)
      throw in.corrupt(fmt::format("has tensor '{}' overlapping another one", printable(p.tensor.name)));
    end = p.offset + p.tensor.bytes;
    p.tensor.data = result.file->data() + data_begin + p.offset;
    const std::string name = p.tensor.name;
    if (!result.tensors.emplace(name, std::move(p.tensor)).second) {
      throw in.corrupt(fmt::format("has the tensor '{}' twice", printable(name)));
    }
  }
  return result;
}

}  // namespace basin::weights
