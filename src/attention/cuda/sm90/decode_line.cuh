// How decode deals out keys. The tiles of all sequences stand in one line, found from the lengths on the device; gangs of h_kv
// CTAs, one for each key head, have equal shares of it. The kernel that folds saved segments asks the same questions.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// The tiles of one key head of a sequence and the segments that they form. `L` is a DecodeLayout.
template <typename L>
struct DecodeTiles {
  static constexpr int kSegmentTiles = L::kSegmentTiles;
  TileWalk walk;
  int keys;  // tiles of the walk
  int count;  // places in the line: a row without keys has one, since its output must be written; 0 without rows

  /// Those of `sequence`, which need not exist.
  __device__ __forceinline__ static DecodeTiles of(const Arguments& arguments, int sequence) {
    DecodeTiles tiles{};
    const int q_tokens = sequence < arguments.batch ? query_tokens(arguments, sequence) : 0;
    if (q_tokens == 0) return tiles;
    const int kv_tokens = key_tokens(arguments, sequence);
    tiles.walk = tile_walk<L::kTile>(arguments, kv_tokens - q_tokens, kv_tokens - 1, kv_tokens);
    tiles.keys = tiles.walk.count();
    tiles.count = max(tiles.keys, 1);
    return tiles;
  }

  /// Those that lane `lane` of the warp holds.
  __device__ __forceinline__ DecodeTiles of_lane(int lane) const {
    const auto from = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
    return {{from(walk.sink_tiles), from(walk.first), from(walk.last)}, from(keys), from(count)};
  }

  __device__ __forceinline__ int segment_of(int i) const {
    return keys > 0 ? walk.tile(i) / kSegmentTiles : 0;
  }
  /// Where the segment of tile i starts and ends.
  __device__ __forceinline__ int start(int i) const {
    return keys > 0 ? walk.below(segment_of(i) * kSegmentTiles) : 0;
  }
  __device__ __forceinline__ int end(int i) const {
    return keys > 0 ? walk.below((segment_of(i) + 1) * kSegmentTiles) : 1;
  }
  /// The place of tile i's segment among those that hold tiles.
  __device__ __forceinline__ int ordinal(int i) const {
    const int segment = segment_of(i);
    const int sinks = (walk.sink_tiles + kSegmentTiles - 1) / kSegmentTiles;  // segments [0, sinks)
    const int first = walk.last > walk.first ? max(walk.first / kSegmentTiles, sinks) : segment;
    return min(segment, sinks) + max(segment - first, 0);
  }
  __device__ __forceinline__ int segments() const { return ordinal(count - 1) + 1; }
};

/// The line and the gangs' shares of it. A gang has the segments that start in its share.
struct DecodeLine {
  int gangs;
  std::int64_t total;

  /// Where the share of a gang begins, and that of the one before it ends.
  __device__ __forceinline__ std::int64_t begin(int gang) const { return total * gang / gangs; }

  /// Whether one gang has all segments of a sequence, whose tiles start at `row` of the line.
  template <typename Tiles>
  __device__ __forceinline__ bool is_whole(const Tiles& tiles, std::int64_t row) const {
    const auto gang = static_cast<int>(((row + 1) * gangs - 1) / total);  // whose share `row` is in
    return row + tiles.start(tiles.count - 1) < begin(gang + 1);
  }
};

}  // namespace basin::attention::sm90
