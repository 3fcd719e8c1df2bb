// The warp of decode that finds work and drives the copy engine.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/fold_queue.cuh"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// `L` is a DecodeLayout.
template <typename L>
struct DecodeFeed {
  using Work = typename L::Work;
  using Shared = typename L::Shared;
  static constexpr int kTile = L::kTile, kSegmentTiles = L::kSegmentTiles, kRows = L::kRows,
                       kSlots = L::kSlots;
  static constexpr bool kFolds = L::kFolds;

  __device__ __forceinline__ static int segment_of(const TileWalk& walk, int i) {
    return walk.tile(i) / kSegmentTiles;
  }
  /// Segments of the walk below `segment` that hold tiles.
  __device__ __forceinline__ static int segments_below(const TileWalk& walk, int segment) {
    const int sinks = (walk.sink_tiles + kSegmentTiles - 1) / kSegmentTiles;  // segments [0, sinks)
    const int begin = walk.last > walk.first ? max(walk.first / kSegmentTiles, sinks) : segment;
    const int end = walk.last > walk.first ? (walk.last + kSegmentTiles - 1) / kSegmentTiles : segment;
    return min(segment, sinks) + max(min(segment, end) - begin, 0);
  }

  __device__ __forceinline__ static TileWalk walk_of(const Arguments& arguments, int q_tokens,
                                                     int kv_tokens) {
    return tile_walk<kTile>(arguments, kv_tokens - q_tokens, kv_tokens - 1, kv_tokens);
  }
  /// Tiles of one key head of a sequence; a row without keys counts as one, since its output must be written.
  __device__ __forceinline__ static int weight_of(const Arguments& arguments, int sequence) {
    if (sequence >= arguments.batch) return 0;
    const int q_tokens = query_tokens(arguments, sequence);
    if (q_tokens == 0) return 0;
    return max(walk_of(arguments, q_tokens, key_tokens(arguments, sequence)).count(), 1);
  }

  /// Segments of one key head of a sequence.
  __device__ __forceinline__ static int segments_of(const Arguments& arguments, int sequence) {
    if (sequence >= arguments.batch) return 0;
    const int q_tokens = query_tokens(arguments, sequence);
    if (q_tokens == 0) return 0;
    const TileWalk walk = walk_of(arguments, q_tokens, key_tokens(arguments, sequence));
    return walk.count() > 0 ? segments_below(walk, segment_of(walk, walk.count() - 1) + 1) : 1;
  }

  /// The line in which the tiles of all sequences stand, and the gangs that share it.
  struct Line {
    std::int64_t total;
    int gangs;

    /// Where the share of a gang begins, and that of the one before it ends.
    __device__ __forceinline__ std::int64_t begin(int gang) const { return total * gang / gangs; }
    /// The gang in whose share `tile` lies.
    __device__ __forceinline__ int gang_of(std::int64_t tile) const {
      return static_cast<int>(((tile + 1) * gangs - 1) / total);
    }
  };

  /// Whether one gang has all segments of a sequence, whose tiles start at `row` of the line.
  __device__ __forceinline__ static bool is_whole(const Arguments& arguments, const Line& line, int sequence,
                                                  std::int64_t row) {
    const TileWalk walk =
        walk_of(arguments, query_tokens(arguments, sequence), key_tokens(arguments, sequence));
    const int last_segment = walk.count() > 0 ? segment_of(walk, walk.count() - 1) : 0;
    const int last_start = walk.count() > 0 ? walk.below(last_segment * kSegmentTiles) : 0;
    return row + last_start < line.begin(line.gang_of(row) + 1);
  }

  /// Blocks that will be in the queue: those of many segments that no CTA has whole.
  __device__ __forceinline__ static int queued_blocks(const Arguments& arguments, const Line& line,
                                                      int lane) {
    int blocks = 0;
    std::int64_t start = 0;  // of the sequences under the lanes
    for (int base = 0; base < arguments.batch; base += 32) {
      const int weight = weight_of(arguments, base + lane);
      const int sum = sum_to_lane(weight, lane);
      if (segments_of(arguments, base + lane) > kSegmentsInLine &&
          !(kFolds && is_whole(arguments, line, base + lane, start + sum - weight))) {
        blocks += arguments.h_kv;
      }
      start += __shfl_sync(0xffffffffu, sum, 31);
    }
    return __reduce_add_sync(0xffffffffu, blocks);
  }

  /// The position of the loader in the ring and in the queue of work.
  struct Loader {
    const Arguments& arguments;
    Shared& shared;
    const CUtensorMap &q_map, &q_sink_map, &k_map, &v_map;
    int lane;
    int turn = 0;
    RingPlace<kSlots> place;
    int queries = 0;

    /// Queues one unit and loads its tiles.
    __device__ __forceinline__ void issue(const Work& work) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_empty[slot], (turn / 2 + 1) % 2);
      if (lane == 0) {
        shared.work[slot] = work;
        barrier_arrive(&shared.work_full[slot]);
      }
      ++turn;
      if (work.sequence < 0 || work.fold_row >= 0) return;
      if (work.first == work.end && work.first_here) load_query(work);
      int page = page_at(work, work.first);
      for (int i = work.first; i < work.end; ++i) {
        const int next_page = page_at(work, i + 1);
        const int key = work.walk.tile(i) * kTile;
        load<L::kQkColumns>(k_map, work, key, page);
        if (i == work.first && work.first_here) load_query(work);
        load<L::kVColumns>(v_map, work, key, page);
        page = next_page;
      }
    }

    /// Waits until everything that was queued is done.
    __device__ __forceinline__ void drain() {
      for (int i = max(turn - 2, 0); i < turn; ++i) barrier_wait(&shared.work_empty[i % 2], i / 2 % 2);
    }

    /// The page of this lane's box of tile i of the walk.
    __device__ __forceinline__ int page_at(const Work& work, int i) const {
      if (i >= work.end) return -1;
      return page_of<kTile>(arguments, work.sequence, work.range.kv_tokens, work.walk.tile(i) * kTile, lane);
    }

    template <int kWidth>
    __device__ __forceinline__ void load(const CUtensorMap& map, const Work& work, int key, int page) {
      barrier_wait(&shared.empty[place.slot], place.parity ^ 1);
      load_keys<kTile, kWidth>(arguments, map, shared.slot(place.slot), &shared.full[place.slot],
                               work.sequence, work.range, work.kv_head, key, page, kEvictNormal, lane);
      place.advance();
    }

    __device__ __forceinline__ void load_query(const Work& work) {
      const int group = arguments.h_q / arguments.h_kv;
      const int bytes = kRows / group * group * L::kQkColumns * static_cast<int>(sizeof(typename L::Element));
      const int buffer = queries % 2;
      barrier_wait(&shared.q_empty[buffer], (queries / 2 + 1) % 2);
      ++queries;
      if (lane != 0) return;
      barrier_arrive_expect(&shared.q_full[buffer], arguments.has_q_sink ? 2 * bytes : bytes);
      const int page = arguments.q_begin == nullptr ? work.sequence : 0;
      for (int column = 0; column < L::kQkColumns; column += kBlockColumns) {
        tma_load(shared.q[buffer] + column * kRows, &q_map, &shared.q_full[buffer], column,
                 work.kv_head * group, work.range.q_row, page, kEvictNormal);
        if (kRows <= 16 && arguments.has_q_sink) {
          tma_load(shared.q_sink[buffer] + column * kRows, &q_sink_map, &shared.q_full[buffer], column,
                   work.kv_head * group, work.range.q_row, page, kEvictNormal);
        }
      }
    }
  };

  __device__ static void feed(const Arguments& arguments, const CUtensorMap& q_map,
                              const CUtensorMap& q_sink_map, const CUtensorMap& k_map,
                              const CUtensorMap& v_map, Shared& shared, int lane) {
    // The key heads of a token lie side by side in memory, so the CTAs of one gang, a head each, walk the same tokens together.
    // The tiles of all sequences stand in one line; a gang has the segments that start in its share of the line.
    const int gangs = static_cast<int>(gridDim.x) / arguments.h_kv;
    const int gang = static_cast<int>(blockIdx.x) / arguments.h_kv;
    std::int64_t total = 0;
    for (int base = 0; base < arguments.batch; base += 32) {
      total += __reduce_add_sync(0xffffffffu, weight_of(arguments, base + lane));
    }
    const Line line{total, gangs};
    const std::int64_t begin = gang < gangs ? line.begin(gang) : total;
    const std::int64_t end = gang < gangs ? line.begin(gang + 1) : total;

    Loader loader{arguments, shared, q_map, q_sink_map, k_map, v_map, lane};
    std::int64_t start = 0;  // of the sequences under the lanes
    for (int base = 0; base < arguments.batch && start < end; base += 32) {
      const int weight = weight_of(arguments, base + lane);
      const std::int64_t together = __reduce_add_sync(0xffffffffu, weight);
      if (start + together > begin) {
        std::int64_t row = start;
        for (int i = 0; i < 32; ++i) {
          const int tiles = __shfl_sync(0xffffffffu, weight, i);
          if (tiles > 0 && row + tiles > begin && row < end)
            feed_sequence(loader, base + i, tiles, row, begin, end);
          row += tiles;
        }
      }
      start += together;
    }
    issue_folds(loader, line);
    Work none{};
    none.sequence = -1;
    loader.issue(none);
  }

  /// Issues rows of blocks with many segments, until there are no more.
  __device__ __forceinline__ static void issue_folds(Loader& loader, const Line& line) {
    const Arguments& arguments = loader.arguments;
    const int blocks = queued_blocks(arguments, line, loader.lane);
    if (blocks == 0) return;
    loader.drain();
    FoldQueue queue(arguments.counters, kRows);
    for (;;) {
      const int2 found = queue.take(blocks, loader.lane);
      if (found.x < 0) break;
      Work work;
      work.sequence = found.x / arguments.h_kv;
      work.kv_head = found.x % arguments.h_kv;
      work.fold_row = found.y;
      work.range = sequence_range(arguments, work.sequence);
      work.segments = segments_of(arguments, work.sequence);
      if (work.fold_row < work.range.q_tokens * (arguments.h_q / arguments.h_kv)) loader.issue(work);
    }
    loader.drain();
    // The CTA that ends last returns the counters to 0.
    std::uint32_t ended = 0;
    if (loader.lane == 0) ended = counter_next(arguments.counters);
    if (__shfl_sync(0xffffffffu, ended, 0) != gridDim.x - 1) return;
    __syncwarp();
    queue.reset(loader.lane);
    if (loader.lane == 0) atomicExch(arguments.counters, 0u);
  }

  /// Issues the segments of one sequence that start in [begin, end) of the line. Its tiles start at `row`.
  __device__ __forceinline__ static void feed_sequence(Loader& loader, int sequence, int tiles,
                                                       std::int64_t row, std::int64_t begin,
                                                       std::int64_t end) {
    const Arguments& arguments = loader.arguments;
    Work work;
    work.sequence = sequence;
    work.fold_row = -1;
    work.kv_head = static_cast<int>(blockIdx.x) % arguments.h_kv;
    work.range = sequence_range(arguments, sequence);
    work.walk = walk_of(arguments, work.range.q_tokens, work.range.kv_tokens);
    work.live = live_rows(arguments, work.range.kv_tokens - work.range.q_tokens, work.range.kv_tokens);
    const int count = work.walk.count();
    const int last_segment = count > 0 ? segment_of(work.walk, count - 1) : 0;
    work.segments = count > 0 ? segments_below(work.walk, last_segment + 1) : 1;
    const int last_start = count > 0 ? work.walk.below(last_segment * kSegmentTiles) : 0;
    // The first segment that starts at `begin` or later.
    int i = static_cast<int>(max(begin - row, std::int64_t{0}));
    if (i > 0 && work.walk.below(segment_of(work.walk, i) * kSegmentTiles) < i) {
      i = work.walk.below((segment_of(work.walk, i) + 1) * kSegmentTiles);
    }
    work.whole = kFolds && i == 0 && row + last_start < end;
    work.here = 0;
    while (i < tiles && row + i < end) {
      const int segment = count > 0 ? segment_of(work.walk, i) : 0;
      work.first = i;
      work.end = count > 0 ? work.walk.below((segment + 1) * kSegmentTiles) : 0;
      work.ordinal = count > 0 ? segments_below(work.walk, segment) : 0;
      work.first_here = work.here == 0;
      ++work.here;
      work.last_here = i == last_start || row + work.end >= end;
      loader.issue(work);
      i = count > 0 ? work.end : tiles;
    }
  }
};

}  // namespace basin::attention::sm90
