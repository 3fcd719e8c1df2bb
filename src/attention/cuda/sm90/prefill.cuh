// Attention over many query rows: one CTA per (sequence, query head, block of rows), persistent, longest blocks first.
//
// Warpgroup 0 feeds: warp 0 hands out work, warp 1 drives the copy engine, warp 2 clears dead rows of values. The other
// warpgroups each own 64 query rows: S = Q K^T of the next tile and O += P V of this one run on the tensor cores while the
// exponentials of the next tile are computed. The running total of the fold lives in shared memory, in slots that belong to
// one thread each, because registers do not hold it beside S, P and O.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/instances.h"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

template <typename T, int kDqk, int kDv, bool kCap>
struct Prefill {
  static constexpr int kTile = tile_keys(kDqk);
  static constexpr int kSegmentTiles = segment_tiles(kDqk);
  static constexpr int kWarpgroups = kDqk <= 64 ? 3 : 2;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumers;
  static constexpr int kStages = kDqk <= 64 ? 4 : 2;
  static_assert(kRows - 64 <= kTile,
                "a warpgroup skips at most one tile while its values wait, or stages run out");
  // 64 K registers over 3 warpgroups (168 each at launch) or 4 (128 each).
  static constexpr int kLoaderRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;

  /// One piece of work: a block of rows of one query head. Written once into shared memory, read there by everyone.
  struct Work {
    int sequence;  // -1: no work left
    int head;
    int first_token;
    SequenceRange range;
    int p_first;  // position of the first row
    int p_last;   // of the last row that exists
    TileWalk walk;
    LiveRows live;
  };

  struct RowSum {
    float m, l;
  };

  struct Shared {
    alignas(1024) T q[kRows * kDqk];
    alignas(1024) T k[kStages][kTile * kDqk];
    alignas(1024) T v[kStages][kTile * kDv];
    alignas(16) float4 total[kConsumers / 32][kDv / 8][32];  // [warp][..][lane]; also stages the output
    RowSum total_rows[kRows];
    RowSum done_rows[kRows];  // of the segment that waits to be folded
    Barrier q_full, q_empty;
    Barrier k_full[kStages], k_empty[kStages];
    Barrier v_full[kStages], v_empty[kStages];
    Barrier v_loaded[kStages];  // an edge tile has arrived and waits for its dead rows to be cleared
    Barrier work_full[2], work_empty[2];
    Work work[2];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one SM");

  // ---------------------------------------------------------------------------------------------- loading

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
      int sum = blocks;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
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

  __device__ __forceinline__ static void describe(const Arguments& arguments, Work& work, int3 found) {
    work.sequence = found.x;
    work.head = found.y;
    if (found.x < 0) return;
    work.first_token = found.z * kRows;
    work.range = sequence_range(arguments, found.x);
    work.p_first = work.range.kv_tokens - work.range.q_tokens + work.first_token;
    work.p_last = work.p_first + min(work.range.q_tokens - work.first_token, kRows) - 1;
    work.walk = tile_walk<kTile>(arguments, work.p_first, work.p_last, work.range.kv_tokens);
    work.live = live_rows(arguments, work.p_first, work.range.kv_tokens);
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
      if (lane == 0) {
        describe(arguments, shared.work[slot], found);
        barrier_arrive(&shared.work_full[slot]);
      }
      __syncwarp();
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
        load_keys<kTile, kDqk>(arguments, k_map, shared.k[stage], &shared.k_full[stage], work.sequence,
                               work.range, kv_head, key, page, kEvictLast, lane);
        if (i == 0) {  // after the first keys, which need not wait for the previous block to finish
          barrier_wait(&shared.q_empty, (q_uses + 1) % 2);
          ++q_uses;
          if (lane == 0) {
            barrier_arrive_expect(&shared.q_full, kRows * kDqk * sizeof(T));
#pragma unroll
            for (int column = 0; column < kDqk; column += kBlockColumns) {
              tma_load(shared.q + column * kRows, &q_map, &shared.q_full, column, work.head,
                       work.range.q_row + work.first_token, arguments.q_begin == nullptr ? work.sequence : 0,
                       kEvictFirst);
            }
          }
        }
        barrier_wait(&shared.v_empty[stage], parity);
        Barrier* arrival = work.live.all(key, kTile) ? &shared.v_full[stage] : &shared.v_loaded[stage];
        load_keys<kTile, kDv>(arguments, v_map, shared.v[stage], arrival, work.sequence, work.range, kv_head,
                              key, page, kEvictLast, lane);
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
        clear_dead_rows<kTile, kDv>(shared.v[stage], work.live, key, lane, 32);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.v_full[stage]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }

  // ------------------------------------------------------------------------------------------- arithmetic

  /// The running state of two rows of one thread (g and g + 8 of its warp's 16).
  struct Rows {
    float m[2];
    float l[2][2];  // key mod 8 = 2 c and 2 c + 1
  };
  __device__ __forceinline__ static void restart(Rows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.m[r] = negative_infinity();
      rows.l[r][0] = rows.l[r][1] = 0.0f;
    }
  }

  template <int kKeys>
  __device__ __forceinline__ static void scores(float (&s)[kKeys / 2], const T* q, const T* k) {
    const std::uint64_t a = swizzled_operand(q, 0), b = swizzled_operand(k, 0);
#pragma unroll
    for (int step = 0; step < kDqk / kStepKeys; ++step) {
      const int block = step / 4, inside = step % 4 * 32;
      Wgmma<kKeys>::template shared<T, Major::k, Major::k>(
          s, advance(a, block * kRows * 128 + inside), advance(b, block * kTile * 128 + inside), step != 0);
    }
  }

  template <int kKeys>
  __device__ __forceinline__ static void values(float (&o)[kDv / 2], const std::uint32_t (&p)[kKeys / 16][4],
                                                const T* v, bool keep) {
    const std::uint64_t b = swizzled_operand(v, kTile * 128);
#pragma unroll
    for (int step = 0; step < kKeys / kStepKeys; ++step) {
      Wgmma<kDv>::template registers<T, Major::mn>(o, p[step], advance(b, step * kStepKeys * 128),
                                                   keep || step != 0);
    }
  }

  /// Which of a thread's columns of a row are visible: bit 2 j + e stands for key `key` + 8 j + e.
  template <int kKeys>
  __device__ __forceinline__ static std::uint32_t seen_columns(const RowKeys& keys, int key) {
    const auto columns_below = [&](int end) {
      const int n = min(max(end - key, 0), kKeys);
      return n / 8 * 2 + min(n % 8, 2);
    };
    const int begin = columns_below(keys.begin);
    return bit_range(0, columns_below(keys.sink_end)) |
           bit_range(begin, max(columns_below(keys.end) - begin, 0));
  }

  /// One tile of scores becomes unrounded probabilities, in place; rows' m and l advance; `rescale` is for O. The thread's
  /// rows stand at positions p and p + 8, its first column is `key`.
  template <int kKeys>
  __device__ __forceinline__ static void softmax(const Arguments& arguments, Rows& rows,
                                                 float (&s)[kKeys / 2], float (&rescale)[2], bool masked,
                                                 int p, int kv_tokens, int key) {
    if constexpr (kCap) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = soft_cap(s[i], arguments.cap_factor);
    }
    if (masked) [[unlikely]] {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t seen = seen_columns<kKeys>(row_keys(arguments, p + 8 * r, kv_tokens), key);
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
          float& score = s[4 * (i / 2) + 2 * r + i % 2];
          score = (seen & (1u << i)) != 0 ? score : negative_infinity();
        }
      }
    }
    // Row by row in the formulas, both rows at once in the code, so that one hides the latencies of the other.
    constexpr int kEights = kKeys / 8;
    float maximum[2][2];
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& most = maximum[i / 2][i % 2];
        most = j == 0 ? s[i] : fmaxf(most, s[4 * j + i]);
      }
    }
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum[r][0] = fmaxf(maximum[r][0], maximum[r][1]);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        maximum[r][0] = fmaxf(maximum[r][0], __shfl_xor_sync(0xffffffffu, maximum[r][0], step));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = next_maximum(rows.m[r], __fmul_rn(maximum[r][0], arguments.score_factor));
      shift[r] = shift_of(m);
      rescale[r] = exp2_fast(__fadd_rn(rows.m[r], -shift[r]));
      rows.m[r] = m;
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = probability(s[i], arguments.score_factor, shift[i / 2 % 2]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float quarter[4] = {};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int i = 8 * w + 2 * r + e;  // key 16 w + 2 c + e of the tile
          if constexpr (kKeys == 128) {
            quarter[w] = quarter_sum(s[i], s[i + 4], s[32 + i], s[36 + i]);
          } else if (16 * w < kKeys) {
            quarter[w] = __fadd_rn(s[i], s[i + 4]);
          }
        }
        rows.l[r][e] =
            add_tile(rows.l[r][e], rescale[r], tile_sum(quarter[0], quarter[1], quarter[2], quarter[3]));
      }
    }
  }

  template <int kKeys>
  __device__ __forceinline__ static void round_probabilities(std::uint32_t (&p)[kKeys / 16][4],
                                                             const float (&s)[kKeys / 2]) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
  }

  /// l of a finished segment, the same in the four threads of a row.
  __device__ __forceinline__ static float segment_sum(const float (&l)[2]) {
    float sum = __fadd_rn(l[0], l[1]);
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
  }

  /// Folds a finished segment into the running total. `done` and `total_rows` point at the first of the thread's rows; the
  /// four threads of a row all need them, and the first of the four writes.
  __device__ __forceinline__ static void fold(const float (&o)[kDv / 2], float4 (&total)[kDv / 8][32],
                                              RowSum* total_rows, const RowSum* done, int lane, bool first) {
    const RowSum low_done = done[0], high_done = done[8];
    if (first) {
#pragma unroll
      for (int i = 0; i < kDv / 8; ++i)
        total[i][lane] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
      if (lane % 4 == 0) total_rows[0] = low_done, total_rows[8] = high_done;
      __syncwarp();
      return;
    }
    const RowSum low_total = total_rows[0], high_total = total_rows[8];
    const Fold low = fold_of(low_total.m, low_done.m);
    const Fold high = fold_of(high_total.m, high_done.m);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDv / 8; ++i) {
      const float4 t = total[i][lane];
      total[i][lane] = make_float4(folded(low, t.x, o[4 * i]), folded(low, t.y, o[4 * i + 1]),
                                   folded(high, t.z, o[4 * i + 2]), folded(high, t.w, o[4 * i + 3]));
    }
    if (lane % 4 == 0) {
      total_rows[0] = {low.m, folded(low, low_total.l, low_done.l)};
      total_rows[8] = {high.m, folded(high, high_total.l, high_done.l)};
    }
    __syncwarp();
  }

  /// Rounds and stores the 16 rows of a warp through its part of `total`.
  __device__ __forceinline__ static void store(const Arguments& arguments, const Work& work,
                                               float (&o)[kDv / 2], const float (&factor)[2], void* staging,
                                               int first_row, int lane) {
    constexpr int kChunks = kDv / 8;  // of 16 bytes, per row
    recompute_from(lane);  // addresses are computed here, not kept in registers through the main loop
    const int g = lane / 4, c = lane % 4;
    auto* words = static_cast<std::uint32_t*>(staging);
    __syncwarp();  // other lanes have read their totals
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int row = g + 8 * r;
        words[row * kChunks * 4 + (j ^ g) * 4 + c] =
            pack<T>(output(o[4 * j + 2 * r], factor[r]), output(o[4 * j + 2 * r + 1], factor[r]));
      }
    }
    __syncwarp();
    constexpr int kRowsAtOnce = 32 / kChunks > 0 ? 32 / kChunks : 1;
    static_assert(32 % kChunks == 0, "a chunk column belongs to one lane");
    const auto* chunks = static_cast<const uint4*>(staging);
    const int j = lane % kChunks;
    const int tokens_left = j * 8 < arguments.d_v ? work.range.q_tokens - first_row : 0;
    auto* out = static_cast<T*>(arguments.out) +
                out_index(arguments, work.sequence, work.range.q_row, work.head, first_row + lane / kChunks) +
                j * 8;
    const std::int64_t stride = kRowsAtOnce * arguments.out_token;
#pragma unroll
    for (int row = lane / kChunks; row < 16; row += kRowsAtOnce) {
      if (row < tokens_left) *reinterpret_cast<uint4*>(out) = chunks[row * kChunks + (j ^ (row % 8))];
      out += stride;
    }
    __syncwarp();  // the staging memory is free again
  }

  __device__ __forceinline__ static TileWalk uniform(const TileWalk& walk) {
    return {__shfl_sync(0xffffffffu, walk.sink_tiles, 0), __shfl_sync(0xffffffffu, walk.first, 0),
            __shfl_sync(0xffffffffu, walk.last, 0)};
  }

  __device__ static void consume(const Arguments& arguments, Shared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) - 128;  // among the consumers
    const int lane = thread % 32, warp = thread / 32;
    const int c = lane % 4;
    const bool leader = lane == 0;  // every warp releases for itself: a slow one must not miss a phase
    const int own_row =
        64 * warpgroup + warp % 4 * 16 + lane / 4;  // in the block; the thread's other row is 8 below
    float4(&total)[kDv / 8][32] = shared.total[warp];
    RowSum* total_rows = shared.total_rows + own_row;
    RowSum* done_rows = shared.done_rows + own_row;
    const T* q = shared.q + warpgroup * 64 * kBlockColumns;
    int use = 0;  // tiles consumed so far
    int q_uses = 0;
    for (int turn = 0;; ++turn) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_full[slot], turn / 2 % 2);
      const Work& work = shared.work[slot];
      if (work.sequence < 0) return;

      // This warpgroup's 64 rows, and the tiles they need of those that the block loads. All of it is the same in every
      // thread; saying so keeps the loop's control in uniform registers.
      const int kv_tokens = work.range.kv_tokens;
      const int p_first = work.p_first + 64 * warpgroup;
      const int p_last = min(p_first + 63, work.p_last);
      const TileWalk block = uniform(work.walk);
      TileWalk walk = uniform(tile_walk<kTile>(arguments, p_first, p_last, kv_tokens));
      if (p_first > p_last) walk = {0, 0, 0};
      const TileWalk unmasked = uniform(unmasked_tiles<kTile>(arguments, p_first, p_first + 63, kv_tokens));
      const int last_use = use + block.count();

      float s[kTile / 2];
      float o[kDv / 2];
      std::uint32_t p[kTile / 16][4];
      float rescale[2] = {1.0f, 1.0f};
      Rows rows;
      restart(rows);
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;
      wgmma_touch(o);
      bool folded_any = false;
      bool fresh = true;       // o holds nothing of the current segment
      int pending = 0;         // the use of the tile whose unrounded probabilities s holds
      int running_stage = -1;  // stage of the values that the tensor cores are reading; -1: none
      int segment = 0;
      bool new_segment = false;  // the pending tile begins a segment, and o belongs to the one before

      const auto segment_done = [&] {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float sum = segment_sum(rows.l[r]);
          if (c == 0) done_rows[8 * r] = {rows.m[r], sum};
        }
        __syncwarp();
        restart(rows);
      };
      // Waits for the products of the tile before the pending one and gives its values back.
      const auto finish_running = [&] {
        wgmma_wait<0>();
        wgmma_touch(o);
        if (running_stage >= 0 && leader) barrier_arrive(&shared.v_empty[running_stage]);
        running_stage = -1;
      };
      // Makes the pending tile ready to be multiplied.
      const auto settle = [&] {
        finish_running();
        if (new_segment) [[unlikely]] {
          fold(o, total, total_rows, done_rows, lane, !folded_any);
          folded_any = true;
          fresh = true;
        } else if (!fresh && __any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) [[unlikely]] {
#pragma unroll
          for (int n = 0; n < kDv / 2; ++n) o[n] = __fmul_rn(o[n], rescale[n / 2 % 2]);
        }
        round_probabilities<kTile>(p, s);
      };
      const auto multiply_pending = [&] {
        barrier_wait(&shared.v_full[pending % kStages], pending / kStages % 2);
        wgmma_fence();
        values<kTile>(o, p, shared.v[pending % kStages], !fresh);
      };
      const auto skip_to = [&](int to) {
#pragma unroll 1
        for (; use < to; ++use) {
          const int stage = use % kStages, parity = use / kStages % 2;
          barrier_wait(&shared.k_full[stage], parity);
          if (leader) barrier_arrive(&shared.k_empty[stage]);
          barrier_wait(&shared.v_full[stage], parity);
          if (leader) barrier_arrive(&shared.v_empty[stage]);
        }
      };

      const auto multiply = [&](bool accumulate) {
        const int stage = use % kStages;
        barrier_wait(&shared.k_full[stage], use / kStages % 2);
        wgmma_fence();
        scores<kTile>(s, q, shared.k[stage]);
        wgmma_commit();
        if (accumulate) {
          multiply_pending();
          wgmma_commit();
        }
        if (accumulate)
          wgmma_wait<1>();
        else
          wgmma_wait<0>();
        wgmma_touch(s);
        if (leader) barrier_arrive(&shared.k_empty[stage]);
      };
      const auto take_scores = [&](int tile) {
        softmax<kTile>(arguments, rows, s, rescale, !unmasked.has(tile), work.p_first + own_row, kv_tokens,
                       tile * kTile + 2 * c);
        wgmma_touch(s);
        pending = use;
        segment = tile / kSegmentTiles;
        ++use;
      };

      const int first_use = use;
      if (last_use > use) barrier_wait(&shared.q_full, q_uses % 2);
      int range = walk.sink_tiles > 0 ? 0 : 1;
      int tile = range == 0 ? 0 : walk.first;
      // A first tile that holds a few sink tokens and nothing else takes one step of keys instead of eight: the others would
      // multiply zeros, and leaving them out changes no bit.
      const bool narrow = !kCap && walk.sink_tiles == 1 && arguments.sink_tokens <= kStepKeys &&
                          walk.last > walk.first && row_keys(arguments, p_first, kv_tokens).begin >= kTile;
      if (narrow) {
        const int stage = use % kStages, parity = use / kStages % 2;
        float sinks[kStepKeys / 2];
        std::uint32_t weights[1][4];
        barrier_wait(&shared.k_full[stage], parity);
        wgmma_fence();
        scores<kStepKeys>(sinks, q, shared.k[stage]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_touch(sinks);
        if (leader) barrier_arrive(&shared.k_empty[stage]);
        softmax<kStepKeys>(arguments, rows, sinks, rescale, true, work.p_first + own_row, kv_tokens, 2 * c);
        round_probabilities<kStepKeys>(weights, sinks);
        barrier_wait(&shared.v_full[stage], parity);
        wgmma_fence();
        values<kStepKeys>(o, weights, shared.v[stage], false);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_touch(o);
        if (leader) barrier_arrive(&shared.v_empty[stage]);
        ++use;
        fresh = false;
        range = 1;
        tile = walk.first;
      }
      if (walk.count() > 0) {
        skip_to(first_use + block.index(tile));
        multiply(false);
        new_segment = narrow && tile >= kSegmentTiles;
        if (new_segment) segment_done();
        take_scores(tile);
        for (++tile; range < 2; ++range, tile = walk.first) {
          const int end = range == 0 ? walk.sink_tiles : walk.last;
          const int to = first_use + block.index(tile);
          if (tile < end && use < to) {
            finish_running();  // the skipped tile may need the stage of its values; the pending tile keeps the other
            skip_to(to);
          }
          // (An iteration begins with the wait for the products of the one before: inside one block the compiler would move
          // that wait before the exponentials, and nothing would run beside them.)
          for (; tile < end; ++tile) {
            settle();
            multiply(true);
            running_stage = pending % kStages;
            fresh = false;
            new_segment = tile / kSegmentTiles != segment;
            if (new_segment) [[unlikely]]
              segment_done();
            take_scores(tile);
          }
        }
        settle();
        multiply_pending();
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_touch(o);
        if (leader) barrier_arrive(&shared.v_empty[pending % kStages]);
      }
      if (last_use > first_use) {
        if (leader) barrier_arrive(&shared.q_empty);
        ++q_uses;
      }
      skip_to(last_use);

      segment_done();
      const RowSum* end = done_rows;
      if (folded_any) {
        fold(o, total, total_rows, done_rows, lane, false);
#pragma unroll
        for (int n = 0; n < kDv / 8; ++n) {
          const float4 t = total[n][lane];
          o[4 * n] = t.x, o[4 * n + 1] = t.y, o[4 * n + 2] = t.z, o[4 * n + 3] = t.w;
        }
        end = total_rows;
      }

      const float sink =
          arguments.sink_logit == nullptr ? negative_infinity() : __ldg(arguments.sink_logit + work.head);
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Finish row = finish(end[8 * r].m, end[8 * r].l, sink);
        factor[r] = row.factor;
        const int token = work.first_token + own_row + 8 * r;
        if (arguments.writes_lse && c == 0 && token < work.range.q_tokens) {
          const std::int64_t at = lse_index(arguments, work.sequence, work.range.q_row, work.head, token);
          if (arguments.lse != nullptr) arguments.lse[at] = row.lse;
          if (arguments.lse_with_sink != nullptr) arguments.lse_with_sink[at] = row.lse_with_sink;
        }
      }
      store(arguments, work, o, factor, &total, work.first_token + 64 * warpgroup + warp % 4 * 16, lane);
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }
};

template <typename T, int kDqk, int kDv, bool kCap>
__global__ void __launch_bounds__((Prefill<T, kDqk, kDv, kCap>::kThreads), 1)
    prefill_kernel(const __grid_constant__ Arguments arguments, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  using P = Prefill<T, kDqk, kDv, kCap>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const int warp =
      __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and known to be
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.q_empty, P::kConsumers / 32);
    for (int stage = 0; stage < P::kStages; ++stage) {
      barrier_init(&shared.k_full[stage], 1);
      barrier_init(&shared.k_empty[stage], P::kConsumers / 32);
      barrier_init(&shared.v_full[stage], 1);
      barrier_init(&shared.v_empty[stage], P::kConsumers / 32);
      barrier_init(&shared.v_loaded[stage], 1);
    }
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(&shared.work_full[slot], 1);
      barrier_init(&shared.work_empty[slot], 2 + P::kConsumers / 32);  // loader, clearer, every consumer warp
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warp < 4) {
    registers_shrink<P::kLoaderRegisters>();
    if (warp == 0) P::hand_out(arguments, shared, static_cast<int>(threadIdx.x) % 32);
    if (warp == 1) P::load(arguments, q_map, k_map, v_map, shared, static_cast<int>(threadIdx.x) % 32);
    if (warp == 2) P::clear(arguments, shared, static_cast<int>(threadIdx.x) % 32);
  } else {
    registers_grow<P::kConsumerRegisters>();
    P::consume(arguments, shared, warp / 4 - 1);
  }
}

template <typename T, int kDqk, int kDv, bool kCap>
Instance prefill_instance() {
  using P = Prefill<T, kDqk, kDv, kCap>;
  return {reinterpret_cast<const void*>(&prefill_kernel<T, kDqk, kDv, kCap>), P::kThreads,
          static_cast<int>(sizeof(typename P::Shared)), P::kRows};
}

}  // namespace basin::attention::sm90
