// The warps of prefill that feed the others: one hands out work, one drives the copy engine, one clears dead rows of values.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// `L` is a PrefillLayout.
template <typename L>
struct PrefillFeed {
  using Part = typename L::Part;
  using Work = typename L::Work;
  using Shared = typename L::Shared;
  static constexpr int kTile = L::kTile, kRows = L::kRows, kStages = L::kStages, kWarpgroups = L::kWarpgroups;
  static constexpr bool kTrims = L::kTrims;

  /// Finds the work behind tickets, which only grow. All lanes of a warp call it together.
  struct Finder {
    int first_sequence = 0;  // of the 32 sequences under the lanes
    int first_ticket = 0;    // of the first of them
    int blocks = 0;          // row blocks of this lane's sequence
    int before = 0;          // row blocks of the lanes below
    int together = -1;       // row blocks of all 32; -1: not read yet

    __device__ __forceinline__ void read(const Arguments& arguments, int lane) {
      const int sequence = first_sequence + lane;
      blocks = sequence < arguments.batch ? (query_tokens(arguments, sequence) + kRows - 1) / kRows : 0;
      const int sum = sum_to_lane(blocks, lane);
      before = sum - blocks;
      together = __shfl_sync(0xffffffffu, sum, 31);
    }

    /// The sequence (-1: none left), query head and block of rows behind a ticket.
    __device__ __forceinline__ int3 find(const Arguments& arguments, int ticket, int lane) {
      if (together < 0) read(arguments, lane);
      while (ticket >= first_ticket + together * arguments.h_q) {
        first_ticket += together * arguments.h_q;
        first_sequence += 32;
        if (first_sequence >= arguments.batch) return {-1, 0, 0};
        read(arguments, lane);
      }
      const int local = ticket - first_ticket;
      const bool mine = local >= before * arguments.h_q && local < (before + blocks) * arguments.h_q;
      const int owner = __ffs(__ballot_sync(0xffffffffu, mine)) - 1;
      const int owner_blocks = __shfl_sync(0xffffffffu, blocks, owner);
      const int rest = local - __shfl_sync(0xffffffffu, before, owner) * arguments.h_q;
      // Query heads of a group side by side (they share keys), blocks descending (long ones first), groups outermost.
      const int group = arguments.h_q / arguments.h_kv;
      const int in_group = rest % group;
      const int block = owner_blocks - 1 - rest / group % owner_blocks;
      return {first_sequence + owner, rest / group / owner_blocks * group + in_group, block};
    }
  };

  /// Describes the work behind a ticket; a lane for each warpgroup's part, lane 0 for the rest.
  __device__ __forceinline__ static void describe(const Arguments& arguments, Work& work, int3 found,
                                                  int lane) {
    if (lane == 0) {
      work.sequence = found.x;
      work.head = found.y;
    }
    if (found.x < 0) return;
    const int first_token = found.z * kRows;
    const SequenceRange range = sequence_range(arguments, found.x);
    const int p_first = range.kv_tokens - range.q_tokens + first_token;
    const int p_last = p_first + min(range.q_tokens - first_token, kRows) - 1;
    if (lane == 0) {
      work.first_token = first_token;
      work.range = range;
      work.p_first = p_first;
      work.walk = tile_walk<kTile>(arguments, p_first, p_last, range.kv_tokens);
      work.live = live_rows(arguments, p_first, range.kv_tokens);
    }
    if (lane < kWarpgroups) {
      work.part[lane] =
          part_of(arguments, p_first + 64 * lane, min(p_first + 64 * lane + 63, p_last), range.kv_tokens);
    }
  }

  /// The part of the rows at positions p_first..p_last, at most 64 of them and perhaps none.
  __device__ __forceinline__ static Part part_of(const Arguments& arguments, int p_first, int p_last,
                                                 int kv_tokens) {
    const RowKeys low = row_keys(arguments, p_first, kv_tokens);
    const RowKeys high = row_keys(arguments, p_last, kv_tokens);
    Part part;
    part.walk = tile_walk<kTile>(arguments, p_first, p_last, kv_tokens);
    if (p_first > p_last) part.walk = {0, 0, 0};
    part.unmasked = unmasked_tiles<kTile>(arguments, p_first, p_first + 63, kv_tokens);
    const TileWalk& walk = part.walk;
    const bool recent = walk.last > walk.first;
    part.narrow =
        kTrims && recent && walk.sink_tiles == 1 && arguments.sink_tokens <= kStepKeys && low.begin >= kTile;
    part.first_high = kTrims && recent && walk.last - walk.first > 1 &&
                      (part.narrow || walk.sink_tiles == 0) && low.begin >= walk.first * kTile + kTile / 2;
    part.last_low = kTrims && recent && high.end <= (walk.last - 1) * kTile + kTile / 2;
    return part;
  }

  /// Draws tickets and puts the work behind them into the two slots.
  __device__ static void hand_out(const Arguments& arguments, Shared& shared, int lane) {
    Finder finder;
    for (int turn = 0;; ++turn) {
      std::uint32_t ticket = 0;
      if (lane == 0) ticket = counter_next(arguments.counters);
      ticket = __shfl_sync(0xffffffffu, ticket, 0);
      const int3 found = finder.find(arguments, static_cast<int>(ticket), lane);
      const int slot = turn % 2;
      barrier_wait(&shared.work_empty[slot], (turn / 2 + 1) % 2);
      describe(arguments, shared.work[slot], found, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.work_full[slot]);
      if (found.x >= 0) continue;
      // The launch draws (work + CTAs) tickets in all; the CTA that ends last resets both counters.
      if (lane == 0 && counter_next(arguments.counters + 1) == gridDim.x - 1) {
        atomicExch(arguments.counters, 0u);
        atomicExch(arguments.counters + 1, 0u);
      }
      return;
    }
  }

  /// Drives the copy engine; one warp.
  __device__ static void load(const Arguments& arguments, const CUtensorMap& q_map, const CUtensorMap& k_map,
                              const CUtensorMap& v_map, Shared& shared, int lane) {
    int use = 0;  // tiles loaded so far
    int q_uses = 0;
    for (int turn = 0;; ++turn) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_full[slot], turn / 2 % 2);
      const Work& work = shared.work[slot];
      if (work.sequence < 0) return;
      const int tiles = work.walk.count();
      const int kv_head = work.head / (arguments.h_q / arguments.h_kv);
      const auto page_at = [&](int i) {
        return i < tiles ? page_of<kTile>(arguments, work.sequence, work.range.kv_tokens,
                                          work.walk.tile(i) * kTile, lane)
                         : -1;
      };
      int page = page_at(0);
      for (int i = 0; i < tiles; ++i, ++use) {
        const int next_page = page_at(i + 1);
        const int stage = use % kStages;
        const int parity = (use / kStages + 1) % 2;
        const int key = work.walk.tile(i) * kTile;
        barrier_wait(&shared.k_empty[stage], parity);
        load_keys<kTile, L::kQkColumns>(arguments, k_map, shared.k[stage], &shared.k_full[stage],
                                        work.sequence, work.range, kv_head, key, page, kEvictLast, lane);
        if (i == 0) {  // after the first keys, which need not wait for the previous block to finish
          barrier_wait(&shared.q_empty, (q_uses + 1) % 2);
          ++q_uses;
          if (lane == 0) {
            barrier_arrive_expect(&shared.q_full, kRows * L::kQkColumns * sizeof(typename L::Element));
#pragma unroll
            for (int column = 0; column < L::kQkColumns; column += kBlockColumns) {
              tma_load(shared.q + column * kRows, &q_map, &shared.q_full, column, work.head,
                       work.range.q_row + work.first_token, arguments.q_begin == nullptr ? work.sequence : 0,
                       kEvictFirst);
            }
          }
        }
        barrier_wait(&shared.v_empty[stage], parity);
        Barrier* arrival = work.live.all(key, kTile) ? &shared.v_full[stage] : &shared.v_loaded[stage];
        load_keys<kTile, L::kVColumns>(arguments, v_map, shared.v[stage], arrival, work.sequence, work.range,
                                       kv_head, key, page, kEvictLast, lane);
        page = next_page;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }

  /// Clears dead rows of edge tiles of V, then hands them to the consumers.
  __device__ static void clear(const Arguments& arguments, Shared& shared, int lane) {
    int use = 0;
    std::uint32_t edges = 0;  // bit s: parity of stage s's v_loaded
    for (int turn = 0;; ++turn) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_full[slot], turn / 2 % 2);
      const Work& work = shared.work[slot];
      if (work.sequence < 0) return;
      const int tiles = work.walk.count();
      for (int i = 0; i < tiles; ++i, ++use) {
        const int key = work.walk.tile(i) * kTile;
        if (work.live.all(key, kTile)) continue;
        const int stage = use % kStages;
        barrier_wait(&shared.v_loaded[stage], edges >> stage & 1);
        edges ^= 1u << stage;
        clear_dead_rows<kTile, L::kVColumns>(shared.v[stage], work.live, key, lane, 32);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.v_full[stage]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }
};

}  // namespace basin::attention::sm90
