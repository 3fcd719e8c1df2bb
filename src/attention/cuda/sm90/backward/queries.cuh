// dq in a pass of its own: one CTA per (sequence, query head, block of query rows) walks over the keys that its rows see. Used where
// keys.cuh has no sums of dq (choose.cc): under windows, of which narrow ones make the scores cheaper to compute again than shares to
// add, with a soft cap, and for heads too wide to hold dq beside dk and dv.
#pragma once

#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/backward/choose.h"
#include "attention/cuda/sm90/backward/instances.h"
#include "attention/cuda/sm90/backward/row_blocks.cuh"
#include "attention/cuda/sm90/backward/store_rows.cuh"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/grid.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/rows.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

template <typename T, int kDqk_, int kDv_, bool kCap_>
struct QueriesLayout {
  using Element = T;
  static constexpr int kDqk = kDqk_, kDv = kDv_;
  static constexpr bool kCap = kCap_;
  // Small CTAs, so that one loads while another computes: under a narrow window they have few tiles each. The widest heads leave room
  // for one CTA, with two warpgroups.
  static constexpr int kWarpgroups = kDqk <= 128 ? 1 : 2;
  static constexpr int kCtas = kDqk <= 64 ? 3 : kDqk <= 128 ? 2 : 1;  // of a multiprocessor
  static constexpr int kRows = backward_block_rows(kDqk);
  static_assert(kRows == 64 * kWarpgroups && kSumRows % kRows == 0,
                "a block of rows has its sums in one place");
  static constexpr int kTile = backward_tile_keys(kDqk);
  static constexpr int kStages = 2;
  static constexpr int kConsumers = 128 * kWarpgroups;
  // One warp loads. Registers move from warpgroup to warpgroup only, so where they are short it has a warpgroup for itself.
  static constexpr bool kMovesRegisters = kDqk > 128;
  static constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32);

  struct Work {
    int sequence, head, kv_head;
    SequenceRange range;
    int first_token;
    int p_first;  // position of the first row
    TileWalk walk;
    TileWalk own[kWarpgroups], unmasked[kWarpgroups];  // of the rows of each warpgroup
    bool narrow;  // the first tile holds a few sink tokens and nothing else that a row sees: one step of keys
  };
  struct Shared {
    alignas(1024) T q[kRows * kDqk];
    alignas(1024) T dout[kRows * kDv];
    alignas(1024) T k[kStages][kTile * kDqk];
    alignas(1024) T v[kStages][kTile * kDv];
    Barrier rows_full;
    Barrier keys_full[kStages], keys_empty[kStages];
    Barrier loaded;  // the last tile has arrived and waits for the rows behind the keys to be cleared
    Work work;
    bool has_work;
  };
  static_assert(kCtas * (sizeof(Shared) + 1024) <= 228 * 1024, "shared memory of one SM");
};

/// `L` is a QueriesLayout.
template <typename L>
struct Queries {
  using T = typename L::Element;
  using Shared = typename L::Shared;
  using Work = typename L::Work;
  static constexpr int kDqk = L::kDqk, kDv = L::kDv, kTile = L::kTile, kRows = L::kRows, kStages = L::kStages;

  /// The work of a CTA: the last blocks of rows first, which see the most keys. False: there is none.
  __device__ __forceinline__ static bool find_work(const BackwardArguments& arguments, int cta, Work& work) {
    work.head = cta % arguments.h_q;
    work.kv_head = work.head / (arguments.h_q / arguments.h_kv);
    work.sequence = cta / arguments.h_q % arguments.batch;
    work.range = sequence_range(arguments, work.sequence);
    const int blocks = (arguments.max_q_tokens + kRows - 1) / kRows;
    work.first_token = (blocks - 1 - cta / arguments.h_q / arguments.batch) * kRows;
    if (work.first_token >= work.range.q_tokens) return false;
    work.p_first = work.range.kv_tokens - work.range.q_tokens + work.first_token;
    const int rows = min(work.range.q_tokens - work.first_token, kRows);
    work.walk = tile_walk<kTile>(arguments, work.p_first, work.p_first + rows - 1, work.range.kv_tokens);
    work.narrow = work.walk.sink_tiles == 1 && arguments.sink_tokens <= kStepKeys &&
                  row_keys(arguments, work.p_first, work.range.kv_tokens).begin >= kTile;
    for (int i = 0; i < L::kWarpgroups; ++i) {
      const int p_first = work.p_first + 64 * i;
      const int p_last = work.p_first + min(64 * i + 64, rows) - 1;
      work.own[i] = p_first > p_last ? TileWalk{0, 0, 0}
                                     : tile_walk<kTile>(arguments, p_first, p_last, work.range.kv_tokens);
      work.unmasked[i] = unmasked_tiles<kTile>(arguments, p_first, p_first + 63, work.range.kv_tokens);
    }
    return true;
  }

  /// Drives the copy engine, and zeroes the rows behind the last key, which the tensor cores multiply by 0. One warp.
  __device__ static void load(const BackwardArguments& arguments, const CUtensorMap& q_map,
                              const CUtensorMap& k_map, const CUtensorMap& v_map, const CUtensorMap& dout_map,
                              Shared& shared, int lane) {
    const Work& work = shared.work;
    const int tiles = work.walk.count();
    if (tiles == 0) return;
    const int q_page = arguments.q_begin == nullptr ? work.sequence : 0;
    const int kv_page = arguments.kv_begin == nullptr ? work.sequence : 0;
    if (lane == 0) {
      const int row = work.range.q_row + work.first_token;
      barrier_arrive_expect(&shared.rows_full, sizeof(shared.q) + sizeof(shared.dout));
#pragma unroll
      for (int column = 0; column < kDqk; column += kBlockColumns)
        tma_load(shared.q + column * kRows, &q_map, &shared.rows_full, column, work.head, row, q_page,
                 kEvictFirst);
#pragma unroll
      for (int column = 0; column < kDv; column += kBlockColumns)
        tma_load(shared.dout + column * kRows, &dout_map, &shared.rows_full, column, work.head, row, q_page,
                 kEvictFirst);
    }
    for (int i = 0; i < tiles; ++i) {
      const int stage = i % kStages, key = work.walk.tile(i) * kTile;
      const bool edge = key + kTile > work.range.kv_tokens;
      barrier_wait(&shared.keys_empty[stage], (i / kStages + 1) % 2);
      Barrier* arrival = edge ? &shared.loaded : &shared.keys_full[stage];
      if (lane == 0) {
        barrier_arrive_expect(arrival, sizeof(shared.k[0]) + sizeof(shared.v[0]));
#pragma unroll
        for (int column = 0; column < kDqk; column += kBlockColumns)
          tma_load(shared.k[stage] + column * kTile, &k_map, arrival, column, work.kv_head,
                   work.range.kv_row + key, kv_page, kEvictLast);
#pragma unroll
        for (int column = 0; column < kDv; column += kBlockColumns)
          tma_load(shared.v[stage] + column * kTile, &v_map, arrival, column, work.kv_head,
                   work.range.kv_row + key, kv_page, kEvictLast);
      }
      if (!edge) continue;
      barrier_wait(&shared.loaded, 0);  // used once: only the last tile is one
      const LiveRows live = {0, 0, work.range.kv_tokens};
      clear_dead_rows<kTile, kDqk>(shared.k[stage], live, key, lane, 32);
      clear_dead_rows<kTile, kDv>(shared.v[stage], live, key, lane, 32);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.keys_full[stage]);
    }
  }

  /// 64 query rows. A thread holds rows g and g + 8 of its warp's 16, and of each eight keys the two from 2 c on.
  struct Consumer {
    const BackwardArguments& arguments;
    Shared& shared;
    const int warpgroup;
    const int lane;
    float lse2[2], big_d[2];

    __device__ __forceinline__ void release(Barrier* barrier) const {
      if (lane == 0) barrier_arrive(barrier);
    }
    __device__ __forceinline__ int row() const {  // in the block
      return warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    }

    /// Scores become dS, rounded; `s` and `dp` hold those of `tile`.
    template <int kKeys>
    __device__ __forceinline__ void differentiate(const float (&s)[kKeys / 2], const float (&dp)[kKeys / 2],
                                                  std::uint32_t (&ds)[kKeys / kStepKeys][4]) const {
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 2) {
        const int r = i / 2 % 2;
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) x[e] = __fmul_rn(s[i + e], __fadd_rn(dp[i + e], -big_d[r]));
        ds[i / 8][i / 2 % 4] = pack<T>(x[0], x[1]);
      }
    }

    template <int kKeys>
    __device__ __forceinline__ void weigh(float (&s)[kKeys / 2], int tile, bool masked) const {
      if constexpr (L::kCap) {
#pragma unroll
        for (float& x : s) x = soft_cap(x, arguments.cap_factor);
      }
      if (masked) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const RowKeys keys =
              row_keys(arguments, shared.work.p_first + row() + 8 * r, shared.work.range.kv_tokens);
          mask_row<0, kKeys>(s, r, seen_columns<kKeys>(keys, tile * kTile + lane % 4 * 2));
        }
      }
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float x = s[i];
        s[i] = exp2_fast(__fmaf_rn(x, arguments.score_factor, -lse2[i / 2 % 2]));
        if constexpr (L::kCap)
          s[i] = __fmul_rn(s[i], x == negative_infinity() ? 0.0f : __fmaf_rn(-x, x, 1.0f));
      }
    }

    /// dQ += dS K with the first kKeys keys of a tile.
    template <int kKeys>
    __device__ __forceinline__ void multiply(float (&dq)[kDqk / 2], int tile, int stage, bool masked) const {
      float s[kKeys / 2], dp[kKeys / 2];
      std::uint32_t ds[kKeys / kStepKeys][4];
      start_scores<T, kDqk, kKeys, kRows, kTile>(s, shared.q + warpgroup * 64 * kBlockColumns,
                                                 shared.k[stage]);
      start_scores<T, kDv, kKeys, kRows, kTile>(dp, shared.dout + warpgroup * 64 * kBlockColumns,
                                                shared.v[stage]);
      wgmma_wait<1>();
      wgmma_touch(s);
      weigh<kKeys>(s, tile, masked);
      wgmma_wait<0>();
      wgmma_touch(dp);
      differentiate<kKeys>(s, dp, ds);
      start_values<T, kDqk, kKeys, kTile>(dq, ds, shared.k[stage]);
      wgmma_wait<0>();
      wgmma_touch(dq);
    }

    __device__ __forceinline__ void run() {
      const Work& work = shared.work;
      const std::int64_t sums =
          sum_index(arguments, work.head, first_block(arguments, work.sequence)) + work.first_token + row();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse2[r] = __ldg(arguments.lse2 + sums + 8 * r);
        big_d[r] = __ldg(arguments.big_d + sums + 8 * r);
      }
      const int tiles = uniform(work.walk.count());
      const bool narrow = uniform(work.narrow ? 1 : 0) != 0;
      float dq[kDqk / 2];
#pragma unroll
      for (float& x : dq) x = 0;
      if (tiles > 0) barrier_wait(&shared.rows_full, 0);
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        const int tile = uniform(work.walk.tile(i)), stage = i % kStages, parity = i / kStages % 2;
        barrier_wait(&shared.keys_full[stage], parity);
        if (uniform(work.own[warpgroup].has(tile) ? 1 : 0) != 0) {
          if (i == 0 && narrow) {
            multiply<kStepKeys>(dq, tile, stage, true);
          } else {
            multiply<kTile>(dq, tile, stage, !work.unmasked[warpgroup].has(tile));
          }
        }
        release(&shared.keys_empty[stage]);
      }
      store(dq);
    }

    __device__ __forceinline__ void store(const float (&dq)[kDqk / 2]) const {
      const Work& work = shared.work;
      const int token = work.first_token + row();
      T* first =
          static_cast<T*>(arguments.dq.data) + row_index(arguments.dq, arguments.q_begin != nullptr,
                                                         work.sequence, work.range.q_row, work.head, token);
      const RowPair<T> rows = {first, arguments.dq.token, token < work.range.q_tokens,
                               token + 8 < work.range.q_tokens, arguments.d_qk};
      store_rows(dq, arguments.scale, rows, 0, lane);
    }
  };
};

template <typename T, int kDqk, int kDv, bool kCap>
__global__ void __launch_bounds__((QueriesLayout<T, kDqk, kDv, kCap>::kThreads),
                                  (QueriesLayout<T, kDqk, kDv, kCap>::kCtas))
    backward_queries_kernel(const __grid_constant__ BackwardArguments arguments,
                            const __grid_constant__ CUtensorMap q_map,
                            const __grid_constant__ CUtensorMap k_map,
                            const __grid_constant__ CUtensorMap v_map,
                            const __grid_constant__ CUtensorMap dout_map) {
  using L = QueriesLayout<T, kDqk, kDv, kCap>;
  using Kernel = Queries<L>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = static_cast<int>(threadIdx.x) % 32;
  grid_launch_dependents();
  if (threadIdx.x == 0) {
    shared.has_work = Kernel::find_work(arguments, static_cast<int>(blockIdx.x), shared.work);
    barrier_init(&shared.rows_full, 1);
    barrier_init(&shared.loaded, 1);
    for (int stage = 0; stage < L::kStages; ++stage) {
      barrier_init(&shared.keys_full[stage], 1);
      barrier_init(&shared.keys_empty[stage], L::kConsumers / 32);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (shared.has_work && warp >= L::kConsumers / 32) {
    if constexpr (L::kMovesRegisters) registers_shrink<24>();
    if (warp == L::kConsumers / 32) Kernel::load(arguments, q_map, k_map, v_map, dout_map, shared, lane);
  } else if (shared.has_work) {
    if constexpr (L::kMovesRegisters) registers_grow<240>();
    typename Kernel::Consumer consumer{arguments, shared, warp / 4, lane, {}, {}};
    consumer.run();
  }
  grid_wait();  // what runs after this grid may use the gradients of the keys
}

template <typename T, int kDqk, int kDv, bool kCap>
Instance backward_queries_instance() {
  using L = QueriesLayout<T, kDqk, kDv, kCap>;
  return {reinterpret_cast<const void*>(&backward_queries_kernel<T, kDqk, kDv, kCap>), L::kThreads,
          static_cast<int>(sizeof(typename L::Shared)), L::kRows};
}

}  // namespace basin::attention::sm90
