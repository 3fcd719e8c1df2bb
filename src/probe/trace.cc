#include "probe/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "basin/base/error.h"
#include "weights/weights.h"

namespace basin::probe {
namespace {

[[noreturn]] void refuse(ErrorCode code, const std::string& what, const std::string& hint = {}) {
  throw Error(code, what, hint);
}

void check_type(const Array& array) {
  if (array.dtype == DType::i32) return;
  refuse(ErrorCode::invalid_argument,
         fmt::format("selections are {}; they must be int32", name(array.dtype)));
}

void check_sizes(std::int64_t queries, std::int64_t topk) {
  constexpr std::int64_t kMost = std::int64_t{1} << 21;
  if (queries >= 1 && topk >= 1 && queries <= kMost && topk <= kMost) return;
  refuse(ErrorCode::invalid_argument,
         fmt::format("its layers have {} queries and topk {}; both must lie between 1 and {}", queries, topk,
                     kMost));
}

std::vector<std::int64_t> count_up(std::int64_t queries) {
  std::vector<std::int64_t> positions(static_cast<std::size_t>(queries));
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

std::vector<std::int64_t> read_positions(const Array& array, std::int64_t queries) {
  if ((array.dtype != DType::i32 && array.dtype != DType::i64) || array.elements() != queries) {
    refuse(ErrorCode::invalid_argument, "q_pos must be int32 or int64 with one position per query");
  }
  std::vector<std::int64_t> positions(static_cast<std::size_t>(queries));
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (array.dtype == DType::i64) {
      std::memcpy(&positions[i], array.data + i * 8, 8);
    } else {
      std::int32_t value = 0;
      std::memcpy(&value, array.data + i * 4, 4);
      positions[i] = value;
    }
    constexpr std::int64_t kMost = std::int64_t{1} << 21;
    if (positions[i] < 0 || positions[i] > kMost || (i > 0 && positions[i] != positions[i - 1] + 1)) {
      refuse(ErrorCode::invalid_argument,
             fmt::format("q_pos[{}] is {}; positions must ascend by one, up to {}", i, positions[i], kMost));
    }
  }
  return positions;
}

using Read = std::function<Array(const std::string& name)>;

std::vector<float> read_mass(const Array& array, const std::string& name, std::int64_t queries) {
  if (array.dtype != DType::f32 || array.shape != std::vector<std::int64_t>{queries}) {
    refuse(ErrorCode::invalid_argument, fmt::format("'{}' must be float32 [{}]", name, queries));
  }
  std::vector<float> mass(static_cast<std::size_t>(queries));
  std::memcpy(mass.data(), array.data, mass.size() * sizeof(float));
  for (std::size_t q = 0; q < mass.size(); ++q) {
    if (!(mass[q] >= 0.0f && mass[q] <= 1.001f)) {
      refuse(ErrorCode::corrupt, fmt::format("'{}', query {}: {} is no share", name, q, mass[q]));
    }
  }
  return mass;
}

std::vector<double> read_rope(const Array& array) {
  constexpr std::int64_t kMostPairs = 4096;
  if (array.dtype != DType::f64 || array.shape.size() != 1 || array.shape[0] < 1 ||
      array.shape[0] > kMostPairs) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("'rope' must be float64 [pairs], 1 to {} of them", kMostPairs));
  }
  std::vector<double> rope(static_cast<std::size_t>(array.shape[0]));
  std::memcpy(rope.data(), array.data, rope.size() * sizeof(double));
  for (const double frequency : rope) {
    if (!(frequency >= 0.0 && frequency <= 4.0))
      refuse(ErrorCode::corrupt, fmt::format("'rope': {} is no angle per token", frequency));
  }
  return rope;
}

// Arrays by name, of either container.
Trace from_arrays(const std::vector<std::string>& names, const Read& read) {
  std::map<std::int64_t, std::string> layers;
  const std::string prefix = "topk/layer_";
  bool has_positions = false, has_rope = false;
  for (const std::string& name : names) {
    if (name == "q_pos") has_positions = true;
    if (name == "rope") has_rope = true;
    if (name.rfind(prefix, 0) != 0) continue;
    std::int64_t number = 0;
    const char *begin = name.data() + prefix.size(), *end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(begin, end, number);
    if (error != std::errc() || stop != end || number < 0) {
      refuse(ErrorCode::invalid_argument, fmt::format("'{}' is not a layer's name", name));
    }
    if (!layers.emplace(number, name).second) {
      refuse(ErrorCode::invalid_argument, fmt::format("layer {} is there twice", number));
    }
  }
  if (layers.empty()) {
    refuse(ErrorCode::invalid_argument, "it has no layers", "name them topk/layer_0, topk/layer_1, ...");
  }
  const Array first = read(layers.begin()->second);
  check_type(first);
  if (first.shape.size() != 2) {
    refuse(ErrorCode::invalid_argument, fmt::format("'{}' has {} dimensions; a layer is [queries, topk]",
                                                    layers.begin()->second, first.shape.size()));
  }
  check_sizes(first.shape[0], first.shape[1]);
  std::vector<Trace::Entry> entries;
  for (const auto& [number, name] : layers) {
    Trace::LoadMass load_mass;
    const std::string mass = fmt::format("mass/layer_{}", number);
    if (std::find(names.begin(), names.end(), mass) != names.end()) {
      load_mass = [read, mass, queries = first.shape[0]] { return read_mass(read(mass), mass, queries); };
    }
    entries.push_back({number,
                       [read, name = name, shape = first.shape] {
                         Array array = read(name);
                         check_type(array);
                         if (array.shape != shape) {
                           refuse(ErrorCode::invalid_argument,
                                  fmt::format("'{}' is [{}], and the first layer is [{}]", name,
                                              fmt::join(array.shape, ", "), fmt::join(shape, ", ")));
                         }
                         return TraceLayer{array, array.data, shape[1] * 4};
                       },
                       std::move(load_mass)});
  }
  return Trace(std::move(entries),
               has_positions ? read_positions(read("q_pos"), first.shape[0]) : count_up(first.shape[0]),
               first.shape[1], has_rope ? read_rope(read("rope")) : std::vector<double>());
}

// All layers in one array [tokens, layers, topk].
Trace from_one_array(const Array& array) {
  check_type(array);
  if (array.shape.size() != 3) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("the array has {} dimensions; it must be [tokens, layers, topk]", array.shape.size()));
  }
  check_sizes(array.shape[0], array.shape[2]);
  if (array.shape[1] < 1) refuse(ErrorCode::invalid_argument, "it has no layers");
  const std::int64_t row = array.shape[2] * 4;
  std::vector<Trace::Entry> entries;
  for (std::int64_t layer = 0; layer < array.shape[1]; ++layer) {
    entries.push_back({layer, [array, layer, row] {
                         return TraceLayer{array, array.data + layer * row, array.shape[1] * row};
                       }});
  }
  return Trace(std::move(entries), count_up(array.shape[0]), array.shape[2]);
}

Trace from_payload(std::string_view text, const TraceShape& shape) {
  auto bytes = std::make_shared<const std::vector<std::byte>>(decode_base64(text));
  Array array;
  if (bytes->size() >= 6 && std::memcmp(bytes->data(), "\x93NUMPY", 6) == 0) {
    array = parse_npy(*bytes, bytes);
    Trace trace = from_one_array(array);
    if ((shape.layers > 0 && shape.layers != trace.layers()) ||
        (shape.topk > 0 && shape.topk != trace.topk())) {
      refuse(ErrorCode::invalid_argument, fmt::format("it has {} layers and topk {}, not what the flags say",
                                                      trace.layers(), trace.topk()));
    }
    return trace;
  }
  if (shape.layers < 1 || shape.topk < 1) {
    refuse(ErrorCode::invalid_argument, "a raw payload does not say its shape",
           "add --layers L and --topk K");
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  const auto size = static_cast<std::int64_t>(bytes->size());
  if (shape.layers > kMost || shape.topk > kMost || size % (4 * shape.layers * shape.topk) != 0) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("{} bytes are no whole number of tokens of {} layers and topk {}", size, shape.layers,
                       shape.topk));
  }
  array.dtype = DType::i32;
  array.shape = {size / (4 * shape.layers * shape.topk), shape.layers, shape.topk};
  array.data = bytes->data();
  array.owner = bytes;
  return from_one_array(array);
}

// The first string under a key `indexer_topk`, at any depth.
const std::string* find_payload(const nlohmann::json& node) {
  if (!node.is_structured()) return nullptr;
  if (node.is_object()) {
    const auto found = node.find("indexer_topk");
    if (found != node.end() && found->is_string()) return found->get_ptr<const std::string*>();
  }
  for (const auto& child : node) {
    if (const std::string* found = find_payload(child)) return found;
  }
  return nullptr;
}

Trace from_json(std::string_view text, const TraceShape& shape) {
  // Depth is bounded: the parser recurses.
  constexpr int kMostDepth = 64;
  bool deep = false;
  const auto limit = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    deep = deep || depth > kMostDepth;
    return depth <= kMostDepth;
  };
  const nlohmann::json answer = nlohmann::json::parse(text, limit, false);
  if (answer.is_discarded() || deep)
    refuse(ErrorCode::corrupt, "it begins like JSON and is none that can be read");
  const std::string* payload = find_payload(answer);
  if (payload == nullptr) {
    refuse(ErrorCode::invalid_argument, "the answer has no text under 'indexer_topk'",
           "start SGLang with --enable-return-indexer-topk and ask for it in the request");
  }
  return from_payload(*payload, shape);
}

}  // namespace

std::vector<std::byte> decode_base64(std::string_view text) {
  std::vector<std::byte> out;
  out.reserve(text.size() / 4 * 3);
  std::uint32_t word = 0;
  int count = 0, padding = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n' || c == '\r' || c == ' ' || c == '\t') continue;
    std::uint32_t digit = 0;
    if (c >= 'A' && c <= 'Z') {
      digit = static_cast<std::uint32_t>(c - 'A');
    } else if (c >= 'a' && c <= 'z') {
      digit = static_cast<std::uint32_t>(c - 'a') + 26;
    } else if (c >= '0' && c <= '9') {
      digit = static_cast<std::uint32_t>(c - '0') + 52;
    } else if (c == '+' || c == '-') {
      digit = 62;
    } else if (c == '/' || c == '_') {
      digit = 63;
    } else if (c == '=') {
      ++padding;
    } else {
      refuse(ErrorCode::corrupt, fmt::format("byte {} is no base64", i));
    }
    if (padding > 0 && c != '=') refuse(ErrorCode::corrupt, "base64 goes on after its end");
    word = word << 6 | digit;
    if (++count < 4) continue;
    if (padding > 2) refuse(ErrorCode::corrupt, "base64 ends in too many =");
    for (int j = 0; j < 3 - padding; ++j) out.push_back(static_cast<std::byte>(word >> (16 - 8 * j) & 0xff));
    word = 0;
    count = 0;
  }
  if (count != 0) refuse(ErrorCode::corrupt, "base64 is cut off: its length is no multiple of 4");
  return out;
}

Trace open_trace(const std::filesystem::path& path, const TraceShape& shape) {
  const weights::MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  try {
    const bool containers = text.rfind("PK", 0) == 0 || path.extension() == ".safetensors";
    if (containers && (shape.layers > 0 || shape.topk > 0)) {
      refuse(ErrorCode::invalid_argument, "it says its own shape", "leave --layers and --topk out");
    }
    if (text.rfind("PK", 0) == 0) {
      const auto npz = std::make_shared<const NpzFile>(path);
      return from_arrays(npz->names(), [npz](const std::string& name) { return npz->read(name); });
    }
    if (path.extension() == ".safetensors") {
      const auto tensors = std::make_shared<const weights::SafetensorsFile>(
          weights::read_safetensors(path, weights::Reading::parts));
      std::vector<std::string> names;
      for (const auto& [name, tensor] : tensors->tensors) names.push_back(name);
      return from_arrays(names, [tensors](const std::string& name) {
        const weights::Tensor& tensor = tensors->tensors.at(name);
        return Array{tensor.dtype, tensor.shape, tensor.data, tensors, true};
      });
    }
    const std::size_t begin = text.find_first_not_of(" \t\r\n");
    if (begin == std::string_view::npos) refuse(ErrorCode::corrupt, "it is empty");
    if (text[begin] == '{' || text[begin] == '[') return from_json(text.substr(begin), shape);
    if (text[begin] == '"') {  // the string alone, as JSON
      const std::size_t end = text.find_last_of('"');
      if (end == begin) refuse(ErrorCode::corrupt, "its string does not end");
      return from_payload(text.substr(begin + 1, end - begin - 1), shape);
    }
    return from_payload(text, shape);
  } catch (const Error& error) {
    const std::string where = path.string();
    if (std::string_view(error.what()).rfind(where, 0) == 0) throw;
    throw error.in(where);
  }
}

Trace make_trace(std::vector<std::vector<std::int32_t>> layers, std::int64_t topk,
                 std::int64_t first_position) {
  std::vector<Trace::Entry> entries;
  std::vector<std::int64_t> positions = count_up(static_cast<std::int64_t>(layers.at(0).size()) / topk);
  for (std::int64_t& position : positions) position += first_position;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    auto rows = std::make_shared<const std::vector<std::int32_t>>(std::move(layers[i]));
    entries.push_back(
        {static_cast<std::int64_t>(i), [rows, topk] {
           const auto* data = reinterpret_cast<const std::byte*>(rows->data());
           const auto count = static_cast<std::int64_t>(rows->size());
           return TraceLayer{{DType::i32, {count / topk, topk}, data, rows, false}, data, topk * 4};
         }});
  }
  return Trace(std::move(entries), std::move(positions), topk);
}

std::int64_t check_row(std::span<const std::int32_t> row, std::int64_t position, std::int64_t layer,
                       std::int64_t query, std::uint64_t* bits) {
  const auto bad = [&](const std::string& what) {
    refuse(ErrorCode::corrupt,
           fmt::format("layer {}, query {} at position {}: {}", layer, query, position, what));
  };
  std::int64_t count = 0;
  for (const std::int32_t key : row) {
    if (key == -1) continue;
    if (key < 0) bad(fmt::format("key {} is negative; -1 stands for none", key));
    if (key > position) bad(fmt::format("key {} comes after the query", key));
    std::uint64_t& word = bits[key / 64];
    const std::uint64_t bit = std::uint64_t{1} << (key % 64);
    if ((word & bit) != 0) bad(fmt::format("key {} is there twice", key));
    word |= bit;
    ++count;
  }
  const auto expected = std::min(static_cast<std::int64_t>(row.size()), position + 1);
  if (count != expected) bad(fmt::format("it has {} keys; it must have {}", count, expected));
  return count;
}

}  // namespace basin::probe
