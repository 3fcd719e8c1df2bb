// Recorded selections of a sparse model: which keys each query of each layer chose.
//
// Read are: .npz and .safetensors with int32 arrays `topk/layer_0`, `topk/layer_1`, ... [queries, topk], padded with -1, and
// optionally `q_pos` [queries] and float32 `mass/layer_0`, ... [queries], the share of the attention over all keys that a row
// holds, and float64 `rope` [pairs], the angle per token of every rotated pair; SGLang's indexer_topk, base64 of int32 (tokens, layers, topk), as text or inside the answer's
// JSON; vLLM's, base64 of an .npy of the same shape.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "probe/npz.h"

namespace basin::probe {

/// What a raw payload does not say of itself; 0 = unknown.
struct TraceShape {
  std::int64_t layers = 0, topk = 0;
};

/// The rows of one layer: query `q` at data + q * stride, [topk] int32, unordered, -1 = none.
struct TraceLayer {
  Array array;  // keeps `data` alive
  const std::byte* data = nullptr;
  std::int64_t stride = 0;  // in bytes
};

/// A trace whose layers are read one at a time: all of them together may be larger than memory.
class Trace {
 public:
  using Load = std::function<TraceLayer()>;
  using LoadMass = std::function<std::vector<float>()>;
  struct Entry {
    std::int64_t number;  // the model's
    Load load;
    LoadMass load_mass = {};  // empty where it is not known
  };
  /// `positions` of the queries ascend by one.
  Trace(std::vector<Entry> entries, std::vector<std::int64_t> positions, std::int64_t topk,
        std::vector<double> rope = {})
      : entries_(std::move(entries)), positions_(std::move(positions)), topk_(topk), rope_(std::move(rope)) {}

  std::int64_t layers() const { return static_cast<std::int64_t>(entries_.size()); }
  std::int64_t queries() const { return static_cast<std::int64_t>(positions_.size()); }
  std::int64_t topk() const { return topk_; }
  /// Empty where it was not recorded.
  const std::vector<double>& rope() const { return rope_; }
  std::span<const std::int64_t> positions() const { return positions_; }
  std::int64_t number(std::int64_t layer) const { return entries_[static_cast<std::size_t>(layer)].number; }
  /// Throws what reading throws, and Error(invalid_argument) when the layer's shape is not that of the first.
  TraceLayer load(std::int64_t layer) const { return entries_[static_cast<std::size_t>(layer)].load(); }
  /// [queries], or empty where it was not recorded. Throws as load() does.
  std::vector<float> mass(std::int64_t layer) const {
    const LoadMass& read = entries_[static_cast<std::size_t>(layer)].load_mass;
    return read ? read() : std::vector<float>();
  }

 private:
  std::vector<Entry> entries_;
  std::vector<std::int64_t> positions_;
  std::int64_t topk_;
  std::vector<double> rope_;
};

/// Throws Error(not_found | io | corrupt | unsupported | invalid_argument).
Trace open_trace(const std::filesystem::path& path, const TraceShape& shape);

/// For tests and null models: rows in memory, [layers][queries * topk].
Trace make_trace(std::vector<std::vector<std::int32_t>> layers, std::int64_t topk,
                 std::int64_t first_position);

/// Sets the bits of a row's keys in `bits` [words of 64], which must be zero, and returns how many they are. Throws
/// Error(corrupt) naming `layer` and `query` for a key that is negative (but -1), after the query, there twice, or for a
/// row that has not min(topk, position + 1) keys.
std::int64_t check_row(std::span<const std::int32_t> row, std::int64_t position, std::int64_t layer,
                       std::int64_t query, std::uint64_t* bits);

std::vector<std::byte> decode_base64(std::string_view text);

}  // namespace basin::probe
