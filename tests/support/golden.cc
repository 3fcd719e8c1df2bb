#include "support/golden.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace basin::test {
namespace {

DType parse_dtype(const std::string& text) {
  static const std::map<std::string, DType> kNames = {
      {"F64", DType::f64},   {"F32", DType::f32}, {"F16", DType::f16},
      {"BF16", DType::bf16}, {"I64", DType::i64}, {"I32", DType::i32},
      {"I16", DType::i16},   {"I8", DType::i8},   {"U8", DType::u8}};
  const auto found = kNames.find(text);
  if (found == kNames.end()) throw std::runtime_error("unknown dtype " + text);
  return found->second;
}

template <typename T>
T element(const GoldenTensor& tensor, std::int64_t i) {
  T value;
  std::memcpy(&value, tensor.bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

double as_double(const GoldenTensor& t, std::int64_t i) {
  switch (t.dtype) {
    case DType::f64:
      return element<double>(t, i);
    case DType::f32:
      return static_cast<double>(element<float>(t, i));
    case DType::f16:
      return static_cast<double>(to_float(element<f16>(t, i)));
    case DType::bf16:
      return static_cast<double>(to_float(element<bf16>(t, i)));
    case DType::i64:
      return static_cast<double>(element<std::int64_t>(t, i));
    case DType::i32:
      return element<std::int32_t>(t, i);
    case DType::i16:
      return element<std::int16_t>(t, i);
    case DType::i8:
      return element<std::int8_t>(t, i);
    case DType::u8:
      return element<std::uint8_t>(t, i);
    default:
      throw std::runtime_error("no plain dtype");
  }
}

std::vector<std::filesystem::path> children(const char* folder, bool want_folders) {
  std::vector<std::filesystem::path> found;
  const auto where = golden_dir() / folder;
  if (!std::filesystem::is_directory(where)) return found;
  for (const auto& entry : std::filesystem::directory_iterator(where)) {
    if (want_folders ? entry.is_directory() : entry.path().extension() == ".safetensors")
      found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::int64_t GoldenTensor::size() const {
  return static_cast<std::int64_t>(bytes.size()) / block_bytes(dtype);
}

std::vector<double> GoldenTensor::doubles() const {
  std::vector<double> values(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = as_double(*this, static_cast<std::int64_t>(i));
  return values;
}

std::vector<float> GoldenTensor::floats() const {
  std::vector<float> values;
  for (const double value : doubles()) values.push_back(static_cast<float>(value));
  return values;
}

std::vector<std::int64_t> GoldenTensor::integers() const {
  std::vector<std::int64_t> values(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto n = static_cast<std::int64_t>(i);
    switch (dtype) {
      case DType::i64:
        values[i] = element<std::int64_t>(*this, n);
        break;
      case DType::i32:
        values[i] = element<std::int32_t>(*this, n);
        break;
      case DType::i16:
        values[i] = element<std::int16_t>(*this, n);
        break;
      case DType::i8:
        values[i] = element<std::int8_t>(*this, n);
        break;
      case DType::u8:
        values[i] = element<std::uint8_t>(*this, n);
        break;
      default:
        throw std::runtime_error("not an integer tensor");
    }
  }
  return values;
}

const GoldenTensor& GoldenFile::at(const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw std::runtime_error(path + " has no tensor " + name);
  return found->second;
}

const std::string& GoldenFile::meta(const std::string& name) const {
  const auto found = metadata.find(name);
  if (found == metadata.end()) throw std::runtime_error(path + " has no metadata " + name);
  return found->second;
}

std::int64_t GoldenFile::meta_int(const std::string& name) const {
  return std::stoll(meta(name));
}
double GoldenFile::meta_double(const std::string& name) const {
  return std::stod(meta(name));
}

GoldenFile read_golden(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path.string());
  std::uint64_t header_bytes = 0;
  in.read(reinterpret_cast<char*>(&header_bytes),
          sizeof header_bytes);  // little-endian, as is every test machine
  if (!in || header_bytes > (1u << 28)) throw std::runtime_error("no safetensors header in " + path.string());
  std::string header(header_bytes, '\0');
  in.read(header.data(), static_cast<std::streamsize>(header_bytes));
  GoldenFile file;
  file.path = path.string();
  const nlohmann::json parsed = nlohmann::json::parse(header);  // items() refers to it
  for (const auto& [name, entry] : parsed.items()) {
    if (name == "__metadata__") {
      file.metadata = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    GoldenTensor tensor;
    tensor.dtype = parse_dtype(entry.at("dtype").get<std::string>());
    tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto begin = entry.at("data_offsets").at(0).get<std::uint64_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::uint64_t>();
    tensor.bytes.resize(end - begin);
    in.seekg(static_cast<std::streamoff>(8 + header_bytes + begin));
    in.read(reinterpret_cast<char*>(tensor.bytes.data()), static_cast<std::streamsize>(end - begin));
    if (!in) throw std::runtime_error(path.string() + " is cut short at " + name);
    file.tensors.emplace(name, std::move(tensor));
  }
  return file;
}

std::filesystem::path golden_dir() {
  const char* forced = std::getenv("BASIN_GOLDEN_DIR");
  return forced != nullptr && *forced != '\0' ? std::filesystem::path(forced)
                                              : std::filesystem::path(BASIN_SOURCE_DIR) / "tests" / "golden";
}

std::vector<std::filesystem::path> golden_ops() {
  return children("ops", false);
}
std::vector<std::filesystem::path> golden_models() {
  return children("models", true);
}

}  // namespace basin::test
