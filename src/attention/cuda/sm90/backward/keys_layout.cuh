// What the warps of a CTA that computes dk and dv share: shape and shared memory.
#pragma once

#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/backward/choose.h"
#include "attention/cuda/sm90/backward/row_blocks.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/sequence.cuh"

namespace basin::attention::sm90 {

/// One block of keys of one key head, and the tiles of query rows that see any of it.
struct KeyBlock {
  int sequence, kv_head, block;
  int group;  // query heads of the key head
  int first_key;
  SequenceRange range;
  int p_first;                // position of query row 0
  int first_tile, last_tile;  // [first, last), in tiles of query rows
  int row_block;              // of the sequence's first row
  // Blocks with sink tokens under a window have several CTAs, each with a share of dk and dv: 0 has the rows near the block, 1 + n those
  // of strip n. -1: this is the only one.
  int share;
  bool takes_turns;  // of a strip: both warpgroups have the block's first 64 keys, and every second tile
  int last_share_before;  // tiles before this one are seen by no later block: their last share of dq comes from this one

  __device__ __forceinline__ int tiles() const { return last_tile - first_tile; }
};

/// Where a warpgroup's share of dq goes.
struct DqUnit {
  float4* sum;
  int head, first_row, first_column;
  bool is_first, is_last;  // of the shares of this unit
};

/// `kSums`: the CTA also adds its share of dq to dq_sums.
template <typename T, int kDqk_, int kDv_, bool kCap_, bool kSums_>
struct KeysLayout {
  using Element = T;
  static constexpr int kDqk = kDqk_, kDv = kDv_;
  static constexpr bool kCap = kCap_, kSums = kSums_;
  // Each of two warpgroups has 64 keys of its own. Wide heads leave no registers for dk beside dv: there both have the same 64 keys,
  // the first computes dv and the second dk.
  static constexpr bool kSplitsProducts = kDqk > 128;
  static constexpr int kKeys = backward_block_keys(kDqk);
  static_assert(kKeys == (kSplitsProducts ? 64 : 128));
  static constexpr int kRows = backward_tile_rows(kDqk, kSums);
  // A tile has two units of dq, one for each warpgroup: of a narrow head 64 rows, of a wider one 64 columns.
  static constexpr bool kUnitsAreRows = kDqk == kUnitColumns;
  static_assert(!kSums || kRows * kDqk == 2 * kUnitRows * kUnitColumns);
  static constexpr int kDsBuffers = 2;
  static constexpr int kConsumers = 256;
  static constexpr int kThreads = 128 + kConsumers;
  // Warpgroups that take turns at tiles, which they do without sums, need three at least.
  static constexpr int kStages = kSums || kDqk > 128 ? 2 : kDqk <= 64 ? 3 : 4;
  static constexpr int kFeederRegisters = 24, kConsumerRegisters = 240;
  static_assert(!kSums || (kDqk == kDv && kDqk <= 128 && !kCap), "dq has sums for heads of one size");

  struct Shared {
    alignas(1024) T k[kKeys * kDqk];
    alignas(1024) T v[kKeys * kDv];
    alignas(1024) T q[kStages][kRows * kDqk];
    alignas(1024) T dout[kStages][kRows * kDv];
    // dS transposed: a row of 128 swizzled bytes for each key. More than one, so that one may be read while another is written.
    alignas(1024) T ds[kSums ? kDsBuffers : 1][kSums ? kKeys * kRows : 1];
    // Of each warpgroup: the sum of the other shares of a unit of dq, for the last one.
    alignas(16) float4 sum[kSums ? 2 : 1][kSums ? kUnitFloats / 4 : 1];
    alignas(16) float lse2[kStages][kRows];
    alignas(16) float big_d[kStages][kRows];
    Barrier keys_full;
    Barrier q_full[kStages], q_empty[kStages];
    Barrier dout_full[kStages], dout_empty[kStages];
    Barrier loaded[kStages];  // a tile with rows of another sequence: q and dout wait to be cleared
    Barrier ds_full[kDsBuffers], ds_empty[kDsBuffers];
    DqUnit unit[2];
    Barrier turn_come[2], dq_added[2];
    KeyBlock work;
    bool has_work;
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one SM");
};

/// Before every position, and behind it.
inline constexpr int kFarBefore = -(1 << 30), kFarBehind = 1 << 30;

/// The positions at which key j is seen: [begin, end). Sink tokens and unlimited windows have no end.
struct SeenFrom {
  int begin, end;
};
__device__ __forceinline__ SeenFrom seen_from(const Arguments& arguments, int key, int kv_tokens) {
  SeenFrom seen;
  seen.begin = arguments.causal ? key : kFarBefore;
  seen.end = kFarBehind;
  if (key >= arguments.sink_tokens) {
    if (arguments.window_right >= 0) seen.begin = max(seen.begin, key - arguments.window_right);
    if (arguments.window > 0) seen.end = min(key + arguments.window, kFarBehind);
  }
  if (key >= kv_tokens) seen.end = seen.begin;
  return seen;
}

/// Tiles of kRows query rows, from the sequence's first on: [first, last).
struct Tiles {
  int first, last;
};

/// Those with a row that sees one of the keys [first_key, first_key + keys). The bounds of what sees a key grow with the key, but for
/// sink tokens, which are the first keys.
template <int kRows>
__device__ __forceinline__ Tiles tiles_that_see(const Arguments& arguments, int first_key, int keys,
                                                const SequenceRange& range) {
  const int kv_tokens = range.kv_tokens, p_first = kv_tokens - range.q_tokens;
  const int last_key = min(first_key + keys, kv_tokens) - 1;
  if (first_key > last_key) return {0, 0};
  int begin = seen_from(arguments, first_key, kv_tokens).begin;
  int end =
      max(seen_from(arguments, first_key, kv_tokens).end, seen_from(arguments, last_key, kv_tokens).end);
  if (first_key < arguments.sink_tokens && arguments.sink_tokens <= last_key)
    begin = min(begin, seen_from(arguments, arguments.sink_tokens, kv_tokens).begin);
  const int first_row = max(begin - p_first, 0), last_row = min(end - p_first, range.q_tokens);
  const int first = first_row / kRows;
  return {first, first_row < last_row ? (last_row + kRows - 1) / kRows : first};
}

/// The first tile behind those that see a block of keys through its window: its rows see the sink tokens alone.
template <int kKeys, int kRows>
__device__ __forceinline__ int first_far_tile(const Arguments& arguments, int first_key,
                                              const SequenceRange& range) {
  const int last_key = min(first_key + kKeys, range.kv_tokens) - 1;
  const int row = last_key + arguments.window - (range.kv_tokens - range.q_tokens);
  return (max(row, 0) + kRows - 1) / kRows;
}

/// The tiles of a strip.
template <int kRows>
__device__ __forceinline__ Tiles tiles_of_strip(int first_far, int strip, int q_tokens) {
  constexpr int kStripTiles = kStripRows / kRows;
  const Tiles tiles = {max(first_far, strip * kStripTiles),
                       min((strip + 1) * kStripTiles, (q_tokens + kRows - 1) / kRows)};
  return {tiles.first, max(tiles.first, tiles.last)};
}

/// The sink tokens of a block are so few that one warpgroup holds them: then the two take turns at the tiles of a strip, and each leaves
/// a share where those of its keys would lie.
template <int kKeys>
__device__ __forceinline__ bool strips_take_turns(const Arguments& arguments, int block) {
  return kKeys == 128 && arguments.sink_tokens - block * kKeys <= 64;
}

/// The work behind a ticket; false: there is none. Strips come first, since they are long; then the first blocks of all sequences
/// and heads, since causal masks make them the longest; and who waits for a lower block of keys waits for an earlier ticket.
template <int kKeys, int kRows>
__device__ __forceinline__ bool find_block(const BackwardArguments& arguments, int ticket, KeyBlock& work) {
  work.kv_head = ticket % arguments.h_kv;
  work.group = arguments.h_q / arguments.h_kv;
  work.sequence = ticket / arguments.h_kv % arguments.batch;
  const int piece = ticket / arguments.h_kv / arguments.batch,
            strips = arguments.sink_blocks * arguments.strips;
  const bool is_strip = piece < strips;
  work.block = is_strip ? piece % arguments.sink_blocks : piece - strips;
  work.share = is_strip ? 1 + piece / arguments.sink_blocks : work.block < arguments.sink_blocks ? 0 : -1;
  work.first_key = work.block * kKeys;
  work.takes_turns = is_strip && strips_take_turns<kKeys>(arguments, work.block);
  work.range = sequence_range(arguments, work.sequence);
  if (work.first_key >= work.range.kv_tokens) return false;
  work.row_block = first_block(arguments, work.sequence);
  work.p_first = work.range.kv_tokens - work.range.q_tokens;
  Tiles tiles = tiles_that_see<kRows>(arguments, work.first_key, kKeys, work.range);
  if (work.share >= 0) {
    const int first_far = first_far_tile<kKeys, kRows>(arguments, work.first_key, work.range);
    if (is_strip) {
      tiles = tiles_of_strip<kRows>(first_far, work.share - 1, work.range.q_tokens);
      if (tiles.first == tiles.last) return false;
    } else {
      tiles.last = max(min(tiles.last, first_far), tiles.first);
    }
  }
  const int next_key = work.first_key + kKeys;
  work.last_share_before = next_key < work.range.kv_tokens
                               ? tiles_that_see<kRows>(arguments, next_key, kKeys, work.range).first
                               : tiles.last;
  work.first_tile = tiles.first;
  work.last_tile = tiles.last;
  return true;
}

/// A share of dk and dv of a block of keys: for each 64 keys, dk and then dv as a warpgroup holds them, [8 columns][thread] float4.
__device__ __forceinline__ float4* shares_of(const BackwardArguments& arguments, int sequence, int kv_head,
                                             int block, int share, int block_keys, int columns) {
  const std::int64_t at =
      ((std::int64_t{sequence} * arguments.h_kv + kv_head) * arguments.sink_blocks + block) *
          (arguments.strips + 1) +
      share;
  return reinterpret_cast<float4*>(arguments.strip_shares + at * block_keys * columns);
}

}  // namespace basin::attention::sm90
