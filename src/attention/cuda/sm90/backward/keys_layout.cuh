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
  int first_key;
  SequenceRange range;
  int p_first;                // position of query row 0
  int first_tile, last_tile;  // [first, last), in tiles of query rows
  int row_block;              // of the sequence's first row
  // Blocks with sink tokens under a window have several CTAs, each with a share of dk and dv: 0 has the rows near the block, 1 + n those
  // of strip n. -1: this is the only one.
  int share;

  __device__ __forceinline__ int tiles() const { return last_tile - first_tile; }
};

/// `kSums`: the CTA also adds its share of dq to dq_sums.
template <typename T, int kDqk_, int kDv_, bool kCap_, bool kSums_>
struct KeysLayout {
  using Element = T;
  static constexpr int kDqk = kDqk_, kDv = kDv_;
  static constexpr bool kCap = kCap_, kSums = kSums_;
  // Each warpgroup has 64 keys of its own. Wide heads leave no registers for dk beside dv: two warpgroups have the same 64 keys, the
  // first computes dv and the second dk.
  static constexpr bool kSplitsProducts = kDqk > 128;
  static constexpr int kWarpgroups = kDqk <= 64 && kSums ? 3 : 2;
  static constexpr int kKeys = backward_block_keys(kDqk, kSums);
  static_assert(kKeys == (kSplitsProducts ? 64 : 64 * kWarpgroups));
  // Two warpgroups have registers to weigh the scores of the next tile beside the products of this one; three overlap each other.
  static constexpr bool kWeighsAhead = kSums && kWarpgroups == 2;
  static constexpr int kRows = kBackwardTileRows;
  // A unit of dq is one tile of a narrow head: the warpgroups take turns. Of wider ones each takes its columns.
  static constexpr bool kAlternates = kDqk == kUnitColumns;
  static constexpr int kDqBuffers = kAlternates ? kWarpgroups : 2 * kWarpgroups;
  // Where warpgroups take turns, dq of a tile is made one tile later, when dS of all its keys is there for certain. (Else both wait for
  // each other at every tile, and two buffers of dS suffice.)
  static constexpr unsigned kDqDelay = kAlternates ? 1 : 0;
  static constexpr unsigned kDsBuffers = kAlternates ? 3 : 2;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumers;
  static constexpr int kStages = kDqk <= 64 ? 3 : 2;
  static constexpr int kFeederRegisters = kWarpgroups == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 240;
  static_assert(!kSums || (kDqk == kDv && kDqk <= 128 && !kCap), "dq has sums for heads of one size");

  struct Shared {
    alignas(1024) T k[kKeys * kDqk];
    alignas(1024) T v[kKeys * kDv];
    alignas(1024) T q[kStages][kRows * kDqk];
    alignas(1024) T dout[kStages][kRows * kDv];
    // dS transposed: a row of 128 swizzled bytes for each key. More than one, so that one may be read while another is written.
    alignas(1024) T ds[kSums ? kDsBuffers : 1][kSums ? kKeys * kRows : 1];
    alignas(1024) float4 dq[kSums ? kDqBuffers : 1][kSums ? kUnitFloats / 4 : 1];
    alignas(16) float lse2[kStages][kRows];
    alignas(16) float big_d[kStages][kRows];
    Barrier keys_full;
    Barrier q_full[kStages], q_empty[kStages];
    Barrier dout_full[kStages], dout_empty[kStages];
    Barrier loaded[kStages];  // a tile with rows of another sequence: q and dout wait to be cleared
    Barrier ds_full[kDsBuffers], ds_empty[kDsBuffers];
    Barrier dq_full[kDqBuffers], dq_empty[kDqBuffers];
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

/// The work behind a ticket; false: there is none. Strips come first, since they are long; then the first blocks of all sequences
/// and heads, since causal masks make them the longest; and who waits for a lower block of keys waits for an earlier ticket.
template <int kKeys, int kRows>
__device__ __forceinline__ bool find_block(const BackwardArguments& arguments, int ticket, KeyBlock& work) {
  work.kv_head = ticket % arguments.h_kv;
  work.sequence = ticket / arguments.h_kv % arguments.batch;
  const int piece = ticket / arguments.h_kv / arguments.batch,
            strips = arguments.sink_blocks * arguments.strips;
  const bool is_strip = piece < strips;
  work.block = is_strip ? piece % arguments.sink_blocks : piece - strips;
  work.share = is_strip ? 1 + piece / arguments.sink_blocks : work.block < arguments.sink_blocks ? 0 : -1;
  work.first_key = work.block * kKeys;
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
