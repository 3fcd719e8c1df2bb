// The work of extend: which unit a CTA takes next. Everything is found on the device from the lengths, so that a captured graph
// replays with other lengths.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/fold_queue.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// Blocks with more segments than this are folded at the end.
inline constexpr int kExtendSegmentsInLine = 16;

/// One unit: a segment of the keys of a block of rows, or the fold of one row. A block is the query heads of one key head times
/// arguments.block_tokens tokens.
struct Unit {
  int sequence;  // -1: no work left
  int kv_head;
  int block;        // of the sequence
  int first_token;  // of the block
  int rows;         // that exist, of the block
  int p_first;      // position of the first row
  int row;          // -1: a segment; otherwise the row of the block to fold
  int first;        // tiles [first, end) of `walk`
  int end;
  int ordinal;   // of the segment among those of the sequence
  int segments;  // of the sequence
  bool in_line;  // the last segment to arrive folds the rows
  SequenceRange range;
  TileWalk walk;
  LiveRows live;
};

/// The number of a unit's block among all.
__device__ __forceinline__ std::int64_t block_number(const Arguments& arguments, const Unit& unit) {
  return (std::int64_t{unit.sequence} * arguments.max_blocks + unit.block) * arguments.h_kv + unit.kv_head;
}

/// Counts the units of sequences and describes them.
template <int kTile, int kSegmentTiles>
struct UnitFinder {
  /// Segments that hold tiles: [0, sinks) and [first, last).
  struct Segments {
    int sinks, first, last;
    __device__ __forceinline__ int count() const { return max(sinks + last - first, 1); }
    __device__ __forceinline__ int at(int ordinal) const {
      return ordinal < sinks ? ordinal : first + ordinal - sinks;
    }
  };
  /// Those that any row of a sequence needs. Rows without keys have one, since their output must be written.
  __device__ __forceinline__ static Segments segments_of(const Arguments& arguments, int q_tokens,
                                                         int kv_tokens) {
    const TileWalk walk = tile_walk<kTile>(arguments, kv_tokens - q_tokens, kv_tokens - 1, kv_tokens);
    Segments segments;
    segments.sinks = (walk.sink_tiles + kSegmentTiles - 1) / kSegmentTiles;
    segments.first = max(walk.first / kSegmentTiles, segments.sinks);
    segments.last = walk.last > walk.first ? (walk.last + kSegmentTiles - 1) / kSegmentTiles : 0;
    segments.last = max(segments.last, segments.first);
    return segments;
  }
  __device__ __forceinline__ static int blocks_of(const Arguments& arguments, int q_tokens) {
    return (q_tokens + arguments.block_tokens - 1) / arguments.block_tokens;
  }
  /// Units of one key head of a sequence: segments times blocks.
  __device__ __forceinline__ static int units_of(const Arguments& arguments, int sequence) {
    const int q_tokens = sequence < arguments.batch ? query_tokens(arguments, sequence) : 0;
    if (q_tokens == 0) return 0;
    return segments_of(arguments, q_tokens, key_tokens(arguments, sequence)).count() *
           blocks_of(arguments, q_tokens);
  }
  /// Blocks of one key head of a sequence that are folded at the end.
  __device__ __forceinline__ static int folded_blocks_of(const Arguments& arguments, int sequence) {
    const int q_tokens = sequence < arguments.batch ? query_tokens(arguments, sequence) : 0;
    if (q_tokens == 0) return 0;
    const int segments = segments_of(arguments, q_tokens, key_tokens(arguments, sequence)).count();
    return segments <= kExtendSegmentsInLine ? 0 : blocks_of(arguments, q_tokens);
  }

  /// What segments and folds have in common.
  __device__ __forceinline__ static Unit describe_block(const Arguments& arguments, int sequence, int block,
                                                        int kv_head) {
    Unit unit;
    unit.sequence = sequence;
    unit.kv_head = kv_head;
    unit.block = block;
    unit.range = sequence_range(arguments, sequence);
    unit.first_token = block * arguments.block_tokens;
    const int tokens = min(unit.range.q_tokens - unit.first_token, arguments.block_tokens);
    unit.rows = tokens * (arguments.h_q / arguments.h_kv);
    unit.p_first = unit.range.kv_tokens - unit.range.q_tokens + unit.first_token;
    unit.walk = tile_walk<kTile>(arguments, unit.p_first, unit.p_first + tokens - 1, unit.range.kv_tokens);
    unit.live = live_rows(arguments, unit.p_first, unit.range.kv_tokens);
    unit.segments = segments_of(arguments, unit.range.q_tokens, unit.range.kv_tokens).count();
    unit.row = -1;
    unit.first = unit.end = unit.ordinal = 0;
    unit.in_line = unit.segments <= kExtendSegmentsInLine;
    return unit;
  }

  /// Unit `index` of one key head of a sequence.
  __device__ __forceinline__ static Unit describe(const Arguments& arguments, int sequence, int index,
                                                  int kv_head) {
    const int q_tokens = query_tokens(arguments, sequence);
    const Segments segments = segments_of(arguments, q_tokens, key_tokens(arguments, sequence));
    const int blocks = blocks_of(arguments, q_tokens);
    Unit unit = describe_block(arguments, sequence, index % blocks, kv_head);
    unit.ordinal = index / blocks;
    const int segment = segments.at(unit.ordinal);
    unit.first = unit.walk.below(segment * kSegmentTiles);
    unit.end = unit.walk.below((segment + 1) * kSegmentTiles);
    return unit;
  }
};

/// Deals units to this CTA. All lanes of a warp call it together.
///
/// The segments of one key head stand in a line. A gang of h_kv CTAs, a key head each, has a fixed share of it; the others are
/// drawn by tickets, the key heads of a unit one after another.
template <typename Finder>
class UnitSource {
 public:
  __device__ __forceinline__ UnitSource(const Arguments& arguments, int lane)
      : arguments_(arguments), lane_(lane) {
    // (Four reads of lengths on their way at once.)
    int total = 0;
    for (int base = 0; base < arguments.batch; base += 128) {
      int units[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) units[i] = Finder::units_of(arguments, base + 32 * i + lane);
      total += units[0] + units[1] + units[2] + units[3];
    }
    total_ = __reduce_add_sync(0xffffffffu, total);
    const int gangs = static_cast<int>(gridDim.x) / arguments.h_kv;
    const int gang = static_cast<int>(blockIdx.x) / arguments.h_kv;
    const int share = gangs > 0 ? static_cast<int>(std::int64_t{total_} * kFixedPercent / 100 / gangs) : 0;
    fixed_ = share * gangs;
    next_ = gang * share;
    end_ = gang < gangs ? next_ + share : next_;
    read();
  }

  /// Draws a ticket, if the next unit needs one. The answer takes a trip to memory; `take` waits for it.
  __device__ __forceinline__ void draw() {
    if (next_ < end_) return;
    ticket_ = 0;
    if (lane_ == 0) ticket_ = atomicAdd(arguments_.counters, 1u);
  }

  /// The next segment; its sequence is -1 when there is none.
  __device__ __forceinline__ Unit take() {
    const int h_kv = arguments_.h_kv;
    if (next_ < end_) return find(next_++, static_cast<int>(blockIdx.x) % h_kv);
    const std::int64_t ticket = __shfl_sync(0xffffffffu, ticket_, 0);
    const std::int64_t index = fixed_ + ticket / h_kv;
    return index < total_ ? find(static_cast<int>(index), static_cast<int>(ticket % h_kv)) : none();
  }

  /// Blocks that are folded at the end.
  __device__ __forceinline__ int folded_blocks() const {
    int blocks = 0;
    for (int base = 0; base < arguments_.batch; base += 32)
      blocks += Finder::folded_blocks_of(arguments_, base + lane_);
    return __reduce_add_sync(0xffffffffu, blocks) * arguments_.h_kv;
  }

  /// The CTA that ends last returns the counters to 0.
  __device__ __forceinline__ void finish(const FoldQueue& queue) {
    std::uint32_t ended = 0;
    if (lane_ == 0) ended = counter_next(arguments_.counters + 1);
    if (__shfl_sync(0xffffffffu, ended, 0) != gridDim.x - 1) return;
    __syncwarp();
    queue.reset(lane_);
    if (lane_ == 0) {
      atomicExch(arguments_.counters, 0u);
      atomicExch(arguments_.counters + 1, 0u);
    }
  }

 private:
  static constexpr int kFixedPercent = 75;

  __device__ __forceinline__ static Unit none() {
    Unit unit{};
    unit.sequence = -1;
    return unit;
  }

  /// Reads the units of 32 sequences.
  __device__ __forceinline__ void read() {
    units_ = Finder::units_of(arguments_, first_sequence_ + lane_);
    const int sum = sum_to_lane(units_, lane_);
    before_ = sum - units_;
    together_ = __shfl_sync(0xffffffffu, sum, 31);
  }

  /// The unit at `index` of the line, which only grows.
  __device__ __forceinline__ Unit find(int index, int kv_head) {
    while (index - first_unit_ >= together_) {
      first_unit_ += together_;
      first_sequence_ += 32;
      read();
    }
    const int local = index - first_unit_;
    const bool mine = local >= before_ && local < before_ + units_;
    const int owner = __ffs(__ballot_sync(0xffffffffu, mine)) - 1;
    return Finder::describe(arguments_, first_sequence_ + owner,
                            local - __shfl_sync(0xffffffffu, before_, owner), kv_head);
  }

  const Arguments& arguments_;
  const int lane_;
  int total_;       // segments of all sequences
  int fixed_;       // of them, dealt out beforehand
  int next_, end_;  // of this CTA's share
  std::uint32_t ticket_ = 0;
  // The 32 sequences under the lanes.
  int first_sequence_ = 0;
  int first_unit_ = 0;  // of the first of them
  int units_ = 0;       // of this lane's
  int before_ = 0;      // units of the lanes below
  int together_ = 0;    // units of all 32
};

}  // namespace basin::attention::sm90
