// A layer's result as an .npz file: what a run leaves behind layer by layer, and goes on from.
#include <fmt/format.h>

#include <cstring>

#include "basin/base/error.h"
#include "probe/layer_arrays.h"
#include "probe/npz.h"
#include "probe/run.h"

namespace basin::probe {
namespace {

template <typename T>
std::vector<T> read_values(const NpzFile& file, const std::string& name, DType dtype) {
  const Array array = file.read(name);
  if (array.dtype != dtype)
    throw Error(ErrorCode::corrupt, fmt::format("'{}' is {}", name, basin::name(array.dtype)));
  std::vector<T> values(static_cast<std::size_t>(array.elements()));
  if (!values.empty()) std::memcpy(values.data(), array.data, values.size() * sizeof(T));
  return values;
}

// A name, its member and its shape.
template <typename Result, typename Visit>
void each_array(Result& r, const Visit& visit) {
  each_profile_array(r.profile, visit);
  const auto pairs = static_cast<std::int64_t>(r.pairs.size());
  visit("pair_error", r.pair_error, ArrayShape{pairs, r.profile.heads});
  visit("pair_error_all", r.pair_error_all, ArrayShape{pairs});
}

}  // namespace

std::filesystem::path layer_file(const std::filesystem::path& folder, std::int64_t layer) {
  return folder / fmt::format("layer_{:03}.npz", layer);
}

void write_layer(const std::filesystem::path& path, const LayerResult& result) {
  const LayerProfile& p = result.profile;
  NpzWriter file(path);
  file.add("numbers", profile_numbers(p));
  file.add("sink_counts", p.sink_counts);
  file.add("windows", p.windows);
  std::vector<std::int64_t> pairs;
  for (const Pair& pair : result.pairs) pairs.insert(pairs.end(), {pair.sink_tokens, pair.window});
  file.add("pairs", pairs);
  const float row_error = static_cast<float>(p.largest_row_error);
  const std::int64_t one[] = {1};
  file.add("row_error", one, std::span<const float>(&row_error, 1));
  each_array(result, [&](const char* name, const std::vector<float>& values,
                         const std::vector<std::int64_t>& shape) { file.add(name, shape, values); });
  if (p.topk_width > 0) {
    const std::int64_t shape[] = {p.tokens, p.topk_width};
    file.add("topk", shape, p.topk);
    file.add("topk_mass", std::span(shape, 1), p.topk_mass);
  }
  file.finish();
}

LayerResult read_layer(const std::filesystem::path& path) {
  const NpzFile file(path);
  try {
    LayerResult result;
    LayerProfile& p = result.profile;
    const auto numbers = read_values<std::int64_t>(file, "numbers", DType::i64);
    if (!read_profile_numbers(numbers, p)) throw Error(ErrorCode::corrupt, "'numbers' has another length");
    p.sink_counts = read_values<std::int64_t>(file, "sink_counts", DType::i64);
    p.windows = read_values<std::int64_t>(file, "windows", DType::i64);
    const auto pairs = read_values<std::int64_t>(file, "pairs", DType::i64);
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) result.pairs.push_back({pairs[i], pairs[i + 1]});
    p.largest_row_error = static_cast<double>(read_values<float>(file, "row_error", DType::f32).at(0));
    each_array(result,
               [&](const char* name, std::vector<float>& values, const std::vector<std::int64_t>& shape) {
                 values = read_values<float>(file, name, DType::f32);
                 std::int64_t count = 1;
                 for (const std::int64_t extent : shape) count *= extent;
                 if (count != static_cast<std::int64_t>(values.size())) {
                   throw Error(ErrorCode::corrupt, fmt::format("'{}' has another length", name));
                 }
               });
    if (p.topk_width > 0) {
      p.topk = read_values<std::int32_t>(file, "topk", DType::i32);
      p.topk_mass = read_values<float>(file, "topk_mass", DType::f32);
    }
    return result;
  } catch (const Error& error) {
    throw error.in(path.string());
  }
}

}  // namespace basin::probe
