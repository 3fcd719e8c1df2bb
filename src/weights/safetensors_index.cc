// model.safetensors.index.json: {"metadata": {...}, "weight_map": {tensor: shard}}.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "basin/base/error.h"
#include "weights/json_file.h"
#include "weights/printable.h"
#include "weights/weights.h"

namespace basin::weights {
namespace {

constexpr std::uint64_t kMaxIndexBytes = 64u << 20;

using WeightMap = std::map<std::string, std::string>;

// A plain name: what leads out of the index's folder is refused, not followed.
void check_shard(const std::string& shard, const std::string& where) {
  const bool plain = !shard.empty() && shard != "." && shard != ".." &&
                     shard.find('/') == std::string::npos && shard.find('\0') == std::string::npos;
  if (!plain) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: the shard '{}' is no name of a file beside it", where, printable(shard)));
  }
}

WeightMap read_weight_map(const std::filesystem::path& index) {
  const nlohmann::json json = read_json_object(index, kMaxIndexBytes);
  const auto it = json.find("weight_map");
  if (it == json.end() || !it->is_object() || it->empty())
    throw Error(ErrorCode::corrupt, fmt::format("{} has no 'weight_map' of tensors", index.string()));
  WeightMap map;
  for (const auto& [tensor, shard] : it->items()) {
    if (!shard.is_string()) {
      throw Error(ErrorCode::corrupt, fmt::format("{}: the shard of tensor '{}' is not a name",
                                                  index.string(), printable(tensor)));
    }
    check_shard(shard.get<std::string>(), index.string());
    map.emplace(tensor, shard.get<std::string>());
  }
  return map;
}

SafetensorsFile read_shard(const std::filesystem::path& index, const std::string& shard) {
  const std::filesystem::path path = index.parent_path() / shard;
  try {
    return read_safetensors(path);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    throw Error(ErrorCode::not_found,
                fmt::format("{} lists the shard '{}', which is not there", index.string(), printable(shard)),
                "fetch the missing file, or the whole model again");
  }
}

}  // namespace

SafetensorsFile read_safetensors_index(const std::filesystem::path& index) {
  const WeightMap map = read_weight_map(index);
  const auto corrupt = [&](const std::string& tensor, const std::string& what) {
    return Error(ErrorCode::corrupt,
                 fmt::format("{}: tensor '{}' {}", index.string(), printable(tensor), what));
  };
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map) shards.insert(shard);
  SafetensorsFile whole;
  WeightMap found;
  for (const std::string& shard : shards) {
    SafetensorsFile part = read_shard(index, shard);
    for (auto& [name, tensor] : part.tensors) {
      const auto listed = map.find(name);
      if (listed == map.end())
        throw corrupt(name, fmt::format("is in '{}' and not listed", printable(shard)));
      if (const auto [other, is_new] = found.emplace(name, shard); !is_new) {
        throw corrupt(
            name, fmt::format("is in two shards, '{}' and '{}'", printable(other->second), printable(shard)));
      }
      if (listed->second != shard) {
        throw corrupt(
            name, fmt::format("is in '{}' and listed in '{}'", printable(shard), printable(listed->second)));
      }
      whole.tensors.emplace(name, std::move(tensor));
    }
    whole.owners.insert(whole.owners.end(), part.owners.begin(), part.owners.end());
  }
  for (const auto& [tensor, shard] : map) {
    if (!found.contains(tensor))
      throw corrupt(tensor, fmt::format("is not in its shard '{}'", printable(shard)));
  }
  return whole;
}

}  // namespace basin::weights
