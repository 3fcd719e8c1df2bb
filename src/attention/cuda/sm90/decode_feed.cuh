// The warp of decode that finds work and drives the copy engine.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/decode_line.cuh"
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
  using Tiles = DecodeTiles<L>;
  static constexpr int kTile = L::kTile, kRows = L::kRows, kSlots = L::kSlots;

  /// The position of the loader in the ring and in the queue of work.
  struct Loader {
    const Arguments& arguments;
    Shared& shared;
    const CUtensorMap &q_map, &q_sink_map, &k_map, &v_map;
    int lane;
    int turn = 0;
    RingPlace<kSlots> place;
    int queries = 0;

    /// Queues one unit and loads its tiles; the first keys are asked for before anything else.
    __device__ __forceinline__ void issue(const Work& work) {
      int page = page_at(work, work.first), next_page = -1;
      int i = work.first;
      do {
        const bool exists = i < work.end;
        const int key = work.walk.tile(i) * kTile;
        // Pages are asked for a tile ahead; only the first keys go before that.
        if (i > work.first) next_page = page_at(work, i + 1);
        if (exists) load<L::kQkColumns>(k_map, work, key, page);
        if (i == work.first) {
          next_page = page_at(work, i + 1);
          announce(work);
          if (work.first_here) load_query(work);
        }
        if (exists) load<L::kVColumns>(v_map, work, key, page);
        page = next_page;
      } while (++i < work.end);
    }

    __device__ __forceinline__ void announce(const Work& work) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_empty[slot], (turn / 2 + 1) % 2);
      if (lane == 0) {
        shared.work[slot] = work;
        barrier_arrive(&shared.work_full[slot]);
      }
      ++turn;
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
    const int gang = static_cast<int>(blockIdx.x) / arguments.h_kv;
    Loader loader{arguments, shared, q_map, q_sink_map, k_map, v_map, lane};
    DecodeLine line{arguments.gangs, 0};
    std::int64_t begin = 0, end = 0;
    // The lengths are gone through twice, by one copy of the code, since instructions come from memory, too: first the line is
    // measured, then this gang's share of it issued.
    Tiles tiles;
    int sum = 0;  // places of this lane's sequence and those below it
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      std::int64_t row = 0;  // where the tiles of the sequences under the lanes start
      for (int base = 0; base < arguments.batch; base += 32) {
        if (pass == 0 || arguments.batch > 32) {  // else they are still here
          tiles = Tiles::of(arguments, base + lane);
          sum = sum_to_lane(tiles.count, lane);
        }
        const std::int64_t own = row + sum - tiles.count;
        row += __shfl_sync(0xffffffffu, sum, 31);
        std::uint32_t here = __ballot_sync(0xffffffffu, pass == 1 && own < end && own + tiles.count > begin);
        for (; here != 0; here &= here - 1) {
          const int owner = __ffs(here) - 1;
          feed_sequence(loader, base + owner, tiles.of_lane(owner), __shfl_sync(0xffffffffu, own, owner),
                        begin, end);
        }
      }
      line.total = row;
      begin = line.begin(gang);
      end = line.begin(gang + 1);
    }
    Work none{};
    none.sequence = -1;
    loader.issue(none);
  }

  /// Issues the segments of one sequence that start in [begin, end) of the line. Its tiles start at `row`.
  __device__ __forceinline__ static void feed_sequence(Loader& loader, int sequence, const Tiles& tiles,
                                                       std::int64_t row, std::int64_t begin,
                                                       std::int64_t end) {
    const Arguments& arguments = loader.arguments;
    int i = static_cast<int>(max(begin - row, std::int64_t{0}));
    if (tiles.start(i) < i) i = tiles.end(i);
    Work work;
    work.sequence = sequence;
    work.kv_head = static_cast<int>(blockIdx.x) % arguments.h_kv;
    work.range = sequence_range(arguments, sequence);
    work.walk = tiles.walk;
    work.live = live_rows(arguments, work.range.kv_tokens - work.range.q_tokens, work.range.kv_tokens);
    const int last = tiles.start(tiles.count - 1);
    work.whole = L::kFolds && i == 0 && row + last < end;
    work.first_here = true;
    while (i < tiles.count && row + i < end) {
      work.first = i;
      i = tiles.end(i);
      work.end = tiles.keys > 0 ? i : 0;
      work.ordinal = tiles.ordinal(work.first);
      work.last_here = work.first == last || row + i >= end;
      loader.issue(work);
      work.first_here = false;
    }
  }
};

}  // namespace basin::attention::sm90
