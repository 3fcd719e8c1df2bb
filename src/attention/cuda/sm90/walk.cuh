// Which keys a row sees, and which tiles a block of rows must visit.
#pragma once

#include "attention/cuda/sm90/arguments.h"

namespace basin::attention::sm90 {

/// The visible keys of a row: [0, sink_end) and [begin, end).
struct RowKeys {
  int sink_end;
  int begin;
  int end;
  __device__ __forceinline__ bool sees(int key) const {
    return key < sink_end || (key >= begin && key < end);
  }
};

/// For the row at position p (which may be negative) of a sequence with kv_tokens keys.
__device__ __forceinline__ RowKeys row_keys(const Arguments& arguments, int p, int kv_tokens) {
  const int limit = max(arguments.causal ? min(p + 1, kv_tokens) : kv_tokens, 0);
  RowKeys keys;
  keys.sink_end = min(arguments.sink_tokens, limit);
  keys.begin = arguments.window == 0 ? 0 : max(p - arguments.window + 1, 0);
  keys.end = arguments.window_right < 0 ? limit : max(min(limit, p + arguments.window_right + 1), 0);
  return keys;
}

/// Tiles that hold a key visible to some row of a block, ascending: [0, sink_tiles), then [first, last).
struct TileWalk {
  int sink_tiles;
  int first;
  int last;
  __device__ __forceinline__ int count() const { return sink_tiles + last - first; }
  __device__ __forceinline__ int tile(int i) const { return i < sink_tiles ? i : first + i - sink_tiles; }
  __device__ __forceinline__ int index(int tile) const {
    return tile < sink_tiles ? tile : sink_tiles + tile - first;
  }
  __device__ __forceinline__ bool has(int tile) const {
    return tile < sink_tiles || (tile >= first && tile < last);
  }
  /// Tiles of the walk below `tile`, which need not be one of them.
  __device__ __forceinline__ int below(int tile) const {
    return min(tile, sink_tiles) + min(max(tile - first, 0), last - first);
  }
};

/// Rows at positions p_first..p_last. Every bound of row_keys grows with p, so the ends of the block suffice.
template <int kTile>
__device__ __forceinline__ TileWalk tile_walk(const Arguments& arguments, int p_first, int p_last,
                                              int kv_tokens) {
  const RowKeys low = row_keys(arguments, p_first, kv_tokens);
  const RowKeys high = row_keys(arguments, p_last, kv_tokens);
  TileWalk walk;
  walk.sink_tiles = (high.sink_end + kTile - 1) / kTile;
  walk.first = low.begin / kTile;
  walk.last = low.begin < high.end ? (high.end + kTile - 1) / kTile : 0;
  walk.first = max(walk.first, walk.sink_tiles);
  walk.last = max(walk.last, walk.first);
  return walk;
}

/// Tiles that every row at positions p_first..p_last sees whole, in the same form; they need no mask.
template <int kTile>
__device__ __forceinline__ TileWalk unmasked_tiles(const Arguments& arguments, int p_first, int p_last,
                                                   int kv_tokens) {
  const RowKeys low = row_keys(arguments, p_first, kv_tokens);
  const RowKeys high = row_keys(arguments, p_last, kv_tokens);
  return {low.sink_end / kTile, (high.begin + kTile - 1) / kTile, low.end / kTile};
}

/// Rows of the tile at `key` that may hold anything at all (NaN of recycled pages, of other sequences, of page tails):
/// those outside [0, sink_end) and [begin, end). The tensor cores multiply them by 0, so they must be made 0 first.
struct LiveRows {
  int sink_end;
  int begin;
  int end;
  __device__ __forceinline__ bool live(int key) const {
    return key < sink_end || (key >= begin && key < end);
  }
  __device__ __forceinline__ bool all(int key, int keys) const {
    return key + keys <= sink_end || (key >= begin && key + keys <= end);
  }
};
__device__ __forceinline__ LiveRows live_rows(const Arguments& arguments, int p_first, int kv_tokens) {
  // Contiguous keys stay valid when they leave a window; pages do not.
  const int begin = arguments.page_table != nullptr ? row_keys(arguments, p_first, kv_tokens).begin : 0;
  return {min(arguments.sink_tokens, kv_tokens), begin, kv_tokens};
}

}  // namespace basin::attention::sm90
