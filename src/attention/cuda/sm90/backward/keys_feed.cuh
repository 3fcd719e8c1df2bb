// The warps that feed the others: one drives the copy engine, one clears rows of other sequences, two add the shares of dq to their
// sums.
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
    const int group = arguments.h_q / arguments.h_kv;
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
    for (int i = 0; i < group; ++i) {
      const int head = work.kv_head * group + i;
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
    const int group = arguments.h_q / arguments.h_kv;
    const int rows = work.range.q_tokens - (work.last_tile - 1) * kRows;
    std::uint32_t used = 0;  // bit s: parity of stage s's `loaded`
    for (int i = 0; i < group; ++i) {
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

  /// Where the share of dq of the n-th tile lies that a warpgroup makes, and the use of the buffer.
  struct DqPlace {
    unsigned buffer, use;
  };
  __device__ __forceinline__ static DqPlace dq_place(unsigned n, int warpgroup) {
    if constexpr (L::kAlternates) {
      return {n % L::kDqBuffers, n / L::kDqBuffers};
    } else {
      return {static_cast<unsigned>(warpgroup) * 2 + n % 2, n / 2};
    }
  }

  /// Adds shares of dq to their sums, each after those of all lower blocks of keys: of the columns of one warpgroup, or of every second
  /// tile. One thread of two.
  __device__ static void add_dq(const BackwardArguments& arguments, Shared& shared, const KeyBlock& work,
                                int half) {
    constexpr int kColumnUnits = L::kDqk / kUnitColumns;
    const int group = arguments.h_q / arguments.h_kv;
    const auto turn = static_cast<std::uint32_t>(work.block);
    unsigned n = 0;
    for (int i = 0; i < group; ++i) {
      const int head = work.kv_head * group + i;
      for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile, ++n) {
        if (L::kAlternates && n % 2 != static_cast<unsigned>(half)) continue;
        const DqPlace place = dq_place(n, half);
        const std::int64_t unit = unit_index<L::kDqk>(arguments, head, work.row_block, 0, 0) +
                                  tile * kColumnUnits + (L::kAlternates ? 0 : half);
        std::uint32_t* turns = arguments.dq_turns + unit;
        float* sum = arguments.dq_sums + unit * kUnitFloats;
        barrier_wait(&shared.dq_full[place.buffer], place.use % 2);
        while (counter_peek(turns) != turn) {
        }
        counter_read(turns);
        fence_proxy_async_all();  // what the copy engine adds next comes after what the flag said
        if (turn == 0) {
          bulk_store(sum, shared.dq[place.buffer], sizeof(shared.dq[0]));
        } else {
          bulk_add(sum, shared.dq[place.buffer], sizeof(shared.dq[0]));
        }
        tma_store_commit();
        tma_store_wait_read();
        barrier_arrive(&shared.dq_empty[place.buffer]);
        // The next block of keys may add when all of this has arrived, not before.
        tma_store_wait();
        fence_proxy_async_all();
        counter_write(turns, turn + 1);
      }
    }
  }
};

}  // namespace basin::attention::sm90
