// The warps that feed the others: one drives the copy engine, one clears rows of other sequences, two say when and where shares of dq
// are added.
#pragma once

#include "attention/cuda/sm90/backward/keys_layout.cuh"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

namespace basin::attention::sm90 {

/// `L` is a KeysLayout.
template <typename L>
struct KeysFeed {
  using T = typename L::Element;
  using Shared = typename L::Shared;
  static constexpr int kKeys = L::kKeys, kRows = L::kRows, kStages = L::kStages;

  /// A tile reaches beyond the rows of its sequence.
  __device__ __forceinline__ static bool is_edge(const KeyBlock& work, int tile) {
    return (tile + 1) * kRows > work.range.q_tokens;
  }

  /// Loads the keys, then the tiles of all query heads of the group, the last tile first. One thread.
  __device__ static void load(const BackwardArguments& arguments, const CUtensorMap& q_map,
                              const CUtensorMap& k_map, const CUtensorMap& v_map, const CUtensorMap& dout_map,
                              Shared& shared, const KeyBlock& work) {
    const int q_page = arguments.q_begin == nullptr ? work.sequence : 0;
    const int kv_page = arguments.kv_begin == nullptr ? work.sequence : 0;
    const int kv_row = work.range.kv_row + work.first_key;
    barrier_arrive_expect(&shared.keys_full, (sizeof(shared.k) + sizeof(shared.v)));
#pragma unroll
    for (int column = 0; column < L::kDqk; column += kBlockColumns)
      tma_load(shared.k + column * kKeys, &k_map, &shared.keys_full, column, work.kv_head, kv_row, kv_page,
               kEvictNormal);
#pragma unroll
    for (int column = 0; column < L::kDv; column += kBlockColumns)
      tma_load(shared.v + column * kKeys, &v_map, &shared.keys_full, column, work.kv_head, kv_row, kv_page,
               kEvictNormal);
    unsigned n = 0;
    for (int head = work.kv_head * work.group; head < (work.kv_head + 1) * work.group; ++head) {
      for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile, ++n) {
        const unsigned stage = n % kStages, parity = (n / kStages + 1) % 2;
        const int row = work.range.q_row + tile * kRows;
        const std::int64_t sums = sum_index(arguments, head, work.row_block) + tile * kRows;
        const bool edge = is_edge(work, tile);
        barrier_wait(&shared.q_empty[stage], parity);
        Barrier* arrival = edge ? &shared.loaded[stage] : &shared.q_full[stage];
        constexpr std::uint32_t kQBytes = sizeof(shared.q[0]) + sizeof(shared.lse2[0]);
        constexpr std::uint32_t kDoutBytes = sizeof(shared.dout[0]) + sizeof(shared.big_d[0]);
        barrier_arrive_expect(arrival, edge ? kQBytes + kDoutBytes : kQBytes);
#pragma unroll
        for (int column = 0; column < L::kDqk; column += kBlockColumns)
          tma_load(shared.q[stage] + column * kRows, &q_map, arrival, column, head, row, q_page,
                   kEvictNormal);
        bulk_load(shared.lse2[stage], arguments.lse2 + sums, sizeof(shared.lse2[0]), arrival);
        barrier_wait(&shared.dout_empty[stage], parity);
        if (!edge) {
          arrival = &shared.dout_full[stage];
          barrier_arrive_expect(arrival, kDoutBytes);
        }
#pragma unroll
        for (int column = 0; column < L::kDv; column += kBlockColumns)
          tma_load(shared.dout[stage] + column * kRows, &dout_map, arrival, column, head, row, q_page,
                   kEvictNormal);
        bulk_load(shared.big_d[stage], arguments.big_d + sums, sizeof(shared.big_d[0]), arrival);
      }
    }
  }

  /// Zeroes the rows of tiles that belong to other sequences: the tensor cores multiply them by weights of 0. One warp.
  __device__ static void clear(const BackwardArguments& arguments, Shared& shared, const KeyBlock& work,
                               int lane) {
    if (work.tiles() == 0 || !is_edge(work, work.last_tile - 1)) return;
    const int rows = work.range.q_tokens - (work.last_tile - 1) * kRows;
    std::uint32_t used = 0;  // bit s: parity of stage s's `loaded`
    for (int i = 0; i < work.group; ++i) {
      const unsigned stage = static_cast<unsigned>(i * work.tiles()) % kStages;
      barrier_wait(&shared.loaded[stage], used >> stage & 1);
      used ^= 1u << stage;
      clear_rows<L::kDqk>(shared.q[stage], rows, lane);
      clear_rows<L::kDv>(shared.dout[stage], rows, lane);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.q_full[stage]);
        barrier_arrive(&shared.dout_full[stage]);
      }
    }
  }

  /// Zeroes the rows from `first` on.
  template <int kColumns>
  __device__ __forceinline__ static void clear_rows(T* tile, int first, int lane) {
    constexpr int kChunksPerRow = 8;  // of 16 bytes
    auto* chunks = reinterpret_cast<uint4*>(tile);
#pragma unroll 1
    for (int block = 0; block < kColumns / kBlockColumns; ++block) {
#pragma unroll 1
      for (int i = first * kChunksPerRow + lane; i < kRows * kChunksPerRow; i += 32)
        chunks[block * kRows * kChunksPerRow + i] = make_uint4(0, 0, 0, 0);
    }
  }

  /// Tells a warpgroup where its shares of dq go, one after the other, each when those of all lower blocks of keys are there; before
  /// the last share of a unit also brings the sum of the others. One thread.
  __device__ static void lead_dq(const BackwardArguments& arguments, Shared& shared, const KeyBlock& work,
                                 int warpgroup) {
    const auto turn = static_cast<std::uint32_t>(work.block);
    unsigned n = 0;
    for (int head = work.kv_head * work.group; head < (work.kv_head + 1) * work.group; ++head) {
      for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile, ++n) {
        const std::int64_t unit =
            unit_index<L::kDqk>(arguments, head, work.row_block, 0, 0) + tile * 2 + warpgroup;
        std::uint32_t* turns = arguments.dq_turns + unit;
        auto* sum = reinterpret_cast<float4*>(arguments.dq_sums + unit * kUnitFloats);
        const bool is_last = tile < work.last_share_before;
        while (counter_peek(turns) != turn) {
        }
        counter_read(turns);
        shared.unit[warpgroup] = {sum,
                                  head,
                                  tile * kRows + (L::kUnitsAreRows ? warpgroup * kUnitRows : 0),
                                  L::kUnitsAreRows ? 0 : warpgroup * kUnitColumns,
                                  turn == 0,
                                  is_last};
        if (is_last && turn > 0) {
          fence_proxy_async_all();  // what the copy engine reads next comes after what the flag said
          barrier_arrive_expect(&shared.turn_come[warpgroup], sizeof(shared.sum[0]));
          bulk_load(shared.sum[warpgroup], sum, sizeof(shared.sum[0]), &shared.turn_come[warpgroup]);
        } else {
          barrier_arrive(&shared.turn_come[warpgroup]);
        }
        barrier_wait(&shared.dq_added[warpgroup], n % 2);
        if (!is_last) counter_write(turns, turn + 1);
      }
    }
  }
};

}  // namespace basin::attention::sm90
