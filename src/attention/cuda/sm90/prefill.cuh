// Attention over many query rows: one CTA per (sequence, query head, block of rows), persistent, longest blocks first.
//
// Warpgroup 0 feeds: warp 0 hands out work, warp 1 drives the copy engine, warp 2 clears dead rows of values. The other
// warpgroups each own 64 query rows: S = Q K^T of the next tile and O += P V of this one run on the tensor cores while the
// exponentials of the next tile are computed. The running total of the fold lies in slots that belong to one thread each,
// because registers do not hold it beside S, P and O: in shared memory, or, where wide heads leave no room, in the workspace.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/instances.h"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/rows.cuh"
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
  static constexpr int kLoaderRegisters = kWarpgroups == 2 ? (kDqk > 128 ? 24 : 40) : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? (kDqk > 128 ? 240 : 232) : 160;
  // Registers are short: the sums l of a segment lie in shared memory, in a slot for each thread.
  static constexpr bool kParksSums = kDqk <= 64;
  // Tiles of which little is seen are cut short. (Not with a soft cap, for want of registers.)
  static constexpr bool kTrims = !kCap;
  // Weights are rounded before O is settled, so that the fold has their registers.
  static constexpr bool kRoundsFirst = kDv > 128;

  /// What one warpgroup's 64 rows of a block need of the tiles that the block loads.
  struct Part {
    TileWalk walk;
    TileWalk unmasked;
    // The first tile holds a few sink tokens and nothing else: one step of keys, then `walk.first`.
    bool narrow;
    bool first_high;  // the first tile (the one after a narrow one) is seen in its upper half only
    bool last_low;    // the last tile is seen in its lower half only
  };

  /// One piece of work: a block of rows of one query head. Written once into shared memory, read there by everyone.
  struct Work {
    int sequence;  // -1: no work left
    int head;
    int first_token;
    SequenceRange range;
    int p_first;  // position of the first row
    TileWalk walk;
    LiveRows live;
    Part part[kWarpgroups];
  };

  struct RowSum {
    float m, l;
  };

  /// The running total of a warp's rows.
  using Total = float4[kDv / 8][32];  // [..][lane]
  static constexpr bool kTotalsInShared = kDqk <= 128;
  static constexpr int kTotalsAtOnce =
      kTotalsInShared ? kDv / 8 : 8;  // in flight per thread, as registers allow
  static constexpr int kTotalBytes =
      kTotalsInShared ? 0 : kConsumers / 32 * int{sizeof(Total)};  // of a CTA, in the workspace
  /// Blocks of 64 output columns that a warp stages at once.
  static constexpr int kStagedBlocks = kTotalsInShared ? kDv / 64 : kDv / 128;
  static constexpr int kStagedBlockBytes = 16 * 128;

  struct Shared {
    alignas(1024) T q[kRows * kDqk];
    alignas(1024) T k[kStages][kTile * kDqk];
    alignas(1024) T v[kStages][kTile * kDv];
    // [warp][..][lane], 16 bytes a thread: totals, where they lie here; also stages the output: blocks of 64 columns of 16
    // swizzled rows
    alignas(1024)
        float4 own[kConsumers / 32][kTotalsInShared ? kDv / 8 : kStagedBlocks * kStagedBlockBytes / 512][32];
    RowSum total_rows[kRows];
    RowSum done_rows[kRows];  // of the segment that waits to be folded
    float4 sums[kParksSums ? kConsumers : 1];
    Barrier q_full, q_empty;
    Barrier k_full[kStages], k_empty[kStages];
    Barrier v_full[kStages], v_empty[kStages + 1];  // (the last one is for nobody: see `running`)
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

  /// One warpgroup's 64 rows of a block, on their walk over the tiles. A thread holds rows g and g + 8 of its warp's 16, and
  /// of each eight keys the two from 2 c on.
  struct Consumer {
    const Arguments& arguments;
    Shared& shared;
    const int warpgroup;
    const int lane;

    const Work* work = nullptr;
    // Tiles are counted as they come; the count of a tile tells its stage and the parity of the stage's barriers.
    unsigned next = 0;            // the next tile to come
    unsigned held = 0;            // the tile whose scores are in s, or whose weights wait for their values
    int running_stage = kStages;  // of the values that the tensor cores read; kStages: none
    int segment_end = 0;          // the tile (of keys) at which the next segment begins
    int folds = 0;                // segments in the total

    float s[kTile / 2];
    float o[kDv / 2];  // of the current segment
    std::uint32_t weights[kTile / kStepKeys][4];
    float m[2];
    float4 kept_sums;  // see `sums`

    __device__ __forceinline__ Consumer(const Arguments& arguments, Shared& shared, int warpgroup)
        : arguments(arguments),
          shared(shared),
          warpgroup(warpgroup),
          lane(static_cast<int>(threadIdx.x) % 32) {}

    /// Where a thread stands. Computed where it is needed: registers are too few to keep it, or what follows from it.
    struct Place {
      int lane;
      int warp;  // among the consumers
      __device__ __forceinline__ Place() {
        int thread = static_cast<int>(threadIdx.x);
        recompute_from(thread);
        lane = thread % 32;
        warp = thread / 32 - 4;
      }
      __device__ __forceinline__ int thread() const { return 32 * warp + lane; }
      __device__ __forceinline__ int row() const { return 16 * warp + lane / 4; }  // in the block
    };

    /// Every warp releases for itself: a slow one must not miss a phase.
    __device__ __forceinline__ void release(Barrier* barrier) const {
      if (lane == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void restart() {
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) m[r] = negative_infinity();
      keep_sums({});
    }

    /// l of row r and key mod 8 = 2 c + e, in order (0, 0), (0, 1), (1, 0), (1, 1).
    __device__ __forceinline__ float4 sums() const {
      if constexpr (kParksSums) {
        return shared.sums[Place().thread()];
      } else {
        return kept_sums;
      }
    }
    __device__ __forceinline__ void keep_sums(float4 sums) {
      if constexpr (kParksSums) {
        shared.sums[Place().thread()] = sums;
      } else {
        kept_sums = sums;
      }
    }

    __device__ __forceinline__ static unsigned stage(unsigned count) {
      return count % kStages;
    }
    __device__ __forceinline__ static unsigned parity(unsigned count) {
      return count / kStages % 2;
    }

    /// Passes over tiles of the block that these rows do not see.
    __device__ __forceinline__ void skip(int tiles) {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        const unsigned unseen = next + static_cast<unsigned>(i);
        barrier_wait(&shared.k_full[stage(unseen)], parity(unseen));
        release(&shared.k_empty[stage(unseen)]);
        barrier_wait(&shared.v_full[stage(unseen)], parity(unseen));
        release(&shared.v_empty[stage(unseen)]);
      }
      // (After the loop: what a loop that waits carries is not known to be uniform.)
      next += static_cast<unsigned>(tiles);
    }

    __device__ __forceinline__ const T* queries() const {
      return shared.q + warpgroup * 64 * kBlockColumns;
    }

    /// Starts the scores of the next tile.
    __device__ __forceinline__ void start_next() {
      barrier_wait(&shared.k_full[stage(next)], parity(next));
      start_scores<T, kDqk, kTile, kRows, kTile>(s, queries(), shared.k[stage(next)]);
    }
    /// They have arrived, when all but `kRunning` groups of products have.
    template <int kRunning>
    __device__ __forceinline__ void finish_next() {
      wgmma_wait<kRunning>();
      wgmma_touch(s);
      release(&shared.k_empty[stage(next)]);
      held = next++;
    }

    /// (m, l) of the segment goes to done_rows, and the next segment begins.
    __device__ __forceinline__ void end_segment() {
      const Place at;
      const float4 l = sums();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = r == 0 ? __fadd_rn(l.x, l.y) : __fadd_rn(l.z, l.w);
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (at.lane % 4 == 0) shared.done_rows[at.row() + 8 * r] = {m[r], sum};
        m[r] = negative_infinity();
      }
      keep_sums({});
      __syncwarp();
    }

    __device__ __forceinline__ Total& total_of(int warp) const {
      if constexpr (kTotalsInShared) {
        return shared.own[warp];
      } else {
        return reinterpret_cast<Total*>(
            arguments.totals)[static_cast<int>(blockIdx.x) * (kConsumers / 32) + warp];
      }
    }

    /// The ended segment joins the running total; the four threads of a row read its sums, the first of them writes.
    __device__ __forceinline__ void fold_segment() {
      const Place at;
      Total& total = total_of(at.warp);
      RowSum* sums = shared.total_rows + at.row();
      const RowSum* done = shared.done_rows + at.row();
      if (folds == 0) {
        if constexpr (kTotalsInShared) {
          if (at.lane == 0) tma_store_wait_read();  // the output that was staged here
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < kDv / 8; ++i)
          total[i][at.lane] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        if (at.lane % 4 == 0) sums[0] = done[0], sums[8] = done[8];
      } else {
        const RowSum low_total = sums[0], high_total = sums[8];
        const Fold low = fold_of(low_total.m, done[0].m);
        const Fold high = fold_of(high_total.m, done[8].m);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kDv / 8; ++i) {
          if (i > 0 && i % kTotalsAtOnce == 0) __syncwarp();
          const float4 t = total[i][at.lane];
          total[i][at.lane] =
              make_float4(sm90::folded(low, t.x, o[4 * i]), sm90::folded(low, t.y, o[4 * i + 1]),
                          sm90::folded(high, t.z, o[4 * i + 2]), sm90::folded(high, t.w, o[4 * i + 3]));
        }
        if (at.lane % 4 == 0) {
          sums[0] = {low.m, sm90::folded(low, low_total.l, done[0].l)};
          sums[8] = {high.m, sm90::folded(high, high_total.l, done[8].l)};
        }
      }
      __syncwarp();
      ++folds;
    }

    /// The last segment, ended, joins the total: (m, l) of the two rows, and how their columns do it.
    __device__ __forceinline__ void fold_last(RowSum (&end)[2], Fold (&fold)[2]) {
      const Place at;
      const RowSum* done = shared.done_rows + at.row();
      end[0] = done[0], end[1] = done[8];
      if (folds == 0) return;
      const RowSum* sums = shared.total_rows + at.row();
      const RowSum low_total = sums[0], high_total = sums[8];
      fold[0] = fold_of(low_total.m, end[0].m);
      fold[1] = fold_of(high_total.m, end[1].m);
      if constexpr (kTotalsInShared) fold_last_columns(at, fold, 0, kDv / 8);
      end[0] = {fold[0].m, sm90::folded(fold[0], low_total.l, end[0].l)};
      end[1] = {fold[1].m, sm90::folded(fold[1], high_total.l, end[1].l)};
    }
    /// Eights of columns [begin, end) of it, in o.
    __device__ __forceinline__ void fold_last_columns(const Place& at, const Fold (&fold)[2], int begin,
                                                      int end) {
      const Total& total = total_of(at.warp);
#pragma unroll
      for (int i = begin; i < end; ++i) {
        if (i > begin && (i - begin) % kTotalsAtOnce == 0) __syncwarp();
        const float4 t = total[i][at.lane];
        o[4 * i] = sm90::folded(fold[0], t.x, o[4 * i]);
        o[4 * i + 1] = sm90::folded(fold[0], t.y, o[4 * i + 1]);
        o[4 * i + 2] = sm90::folded(fold[1], t.z, o[4 * i + 2]);
        o[4 * i + 3] = sm90::folded(fold[1], t.w, o[4 * i + 3]);
      }
    }

    /// Waits for the products that are running and makes O ready for the tile that comes: it joins the total if that tile
    /// begins a segment, and is rescaled if a maximum moved.
    template <typename Round>
    __device__ __forceinline__ void settle(bool new_segment, const float (&rescale)[2], bool moved,
                                           const Round& round) {
      if (new_segment || __any_sync(0xffffffffu, moved)) [[unlikely]] {
        wgmma_wait<0>();
        wgmma_touch(o);
        if constexpr (kRoundsFirst) round();
        if (new_segment) {
          fold_segment();
#pragma unroll
          for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;
        } else {
#pragma unroll
          for (int i = 0; i < kDv / 2; ++i) o[i] = __fmul_rn(o[i], rescale[i / 2 % 2]);
        }
      } else if constexpr (kRoundsFirst) {
        wgmma_wait<0>();
        wgmma_touch(o);
        round();
      }
      wgmma_wait<0>();
      wgmma_touch(o);
      release(&shared.v_empty[running_stage]);
    }

    /// Scores of keys that a row does not see become -inf.
    template <int kKeys, int kFrom, int kTo>
    __device__ __forceinline__ void mask(float (&x)[kKeys / 2], int tile) const {
      const Place at;
      const int key = tile * kTile + kFrom + at.lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t seen = seen_columns<kTo - kFrom>(
            row_keys(arguments, work->p_first + at.row() + 8 * r, work->range.kv_tokens), key);
        mask_row<kFrom, kTo>(x, r, seen);
      }
    }

    /// Scores of the keys [kFrom, kTo) of `tile` become weights, the others' weights 0; m and l advance, and O is settled
    /// (not by a narrow tile, which is the first). `x` holds the scores of all kKeys keys from the tile's first on.
    template <int kKeys, int kFrom, int kTo>
    __device__ __forceinline__ void weigh(float (&x)[kKeys / 2], std::uint32_t (&w)[kKeys / kStepKeys][4],
                                          int tile, bool masked) {
      constexpr int kBegin = kFrom / 2, kEnd = kTo / 2;  // registers
      if constexpr (kCap) {
        // ptxas caps all scores side by side if it may. A branch that is always taken keeps it to as many as registers hold.
        constexpr int kAtOnce = kDqk <= 192 ? kEnd - kBegin : 8;
#pragma unroll
        for (int from = kBegin; from < kEnd; from += kAtOnce) {
          int exists = 1;
          if constexpr (kAtOnce < kEnd - kBegin) {
            exists = arguments.cap_factor > 0;
            recompute_from(exists);
          }
          if (exists != 0) {
#pragma unroll
            for (int i = from; i < from + kAtOnce; ++i) x[i] = soft_cap(x[i], arguments.cap_factor);
          }
        }
      }
      const bool new_segment = kKeys == kTile && tile >= segment_end;
      if (masked || new_segment) [[unlikely]] {
        if (new_segment) {
          end_segment();
          segment_end = (tile / kSegmentTiles + 1) * kSegmentTiles;
        }
        if (masked) mask<kKeys, kFrom, kTo>(x, tile);
      }
      float maximum[2];
      row_maxima<kFrom, kTo>(x, maximum);
      float shift[2], rescale[2];
      bool moved = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = next_maximum(m[r], __fmul_rn(maximum[r], arguments.score_factor));
        shift[r] = shift_of(next);
        rescale[r] = exp2_fast(__fadd_rn(m[r], -shift[r]));
        moved |= rescale[r] != 1.0f && m[r] != negative_infinity();  // (-inf: O is 0 still)
        m[r] = next;
      }
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) x[i] = probability(x[i], arguments.score_factor, shift[i / 2 % 2]);
      float4 l = sums();
      l.x = add_tile(l.x, rescale[0], sum_of<kFrom, kTo>(x, 0));
      l.y = add_tile(l.y, rescale[0], sum_of<kFrom, kTo>(x, 1));
      l.z = add_tile(l.z, rescale[1], sum_of<kFrom, kTo>(x, 2));
      l.w = add_tile(l.w, rescale[1], sum_of<kFrom, kTo>(x, 3));
      keep_sums(l);
      if constexpr (!kParksSums) {  // now: later, the probabilities would live on beside the weights
        asm volatile("" : "+f"(kept_sums.x), "+f"(kept_sums.y), "+f"(kept_sums.z), "+f"(kept_sums.w));
      }
      const auto round = [&] {
#pragma unroll
        for (int step = 0; step < kKeys / kStepKeys; ++step) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool inside = step * kStepKeys >= kFrom && step * kStepKeys < kTo;
            w[step][i] = inside ? pack<T>(x[8 * step + 2 * i], x[8 * step + 2 * i + 1]) : 0u;
          }
        }
      };
      if constexpr (kKeys == kTile) settle(new_segment, rescale, moved, round);
      if constexpr (kKeys != kTile || !kRoundsFirst) round();
    }

    /// Starts O += P V with the first kKeys keys of the held tile.
    template <int kKeys, int kSteps>
    __device__ __forceinline__ void start_held(const std::uint32_t (&w)[kSteps][4]) {
      running_stage = static_cast<int>(stage(held));
      barrier_wait(&shared.v_full[running_stage], parity(held));
      start_values<T, kDv, kKeys, kTile>(o, w, shared.v[running_stage]);
    }

    /// A first tile that holds a few sink tokens and nothing else takes one step of keys instead of eight: the others would
    /// multiply zeros, and leaving them out changes no bit. Runs beside the scores of the next tile, `skipped` tiles on.
    __device__ __forceinline__ void narrow_tile(int skipped) {
      float x[kStepKeys / 2];
      std::uint32_t w[1][4];
      barrier_wait(&shared.k_full[stage(next)], parity(next));
      start_scores<T, kDqk, kStepKeys, kRows, kTile>(x, queries(), shared.k[stage(next)]);
      wgmma_wait<0>();
      wgmma_touch(x);
      release(&shared.k_empty[stage(next)]);
      held = next++;
      weigh<kStepKeys, 0, kStepKeys>(x, w, 0, true);
      start_held<kStepKeys>(w);
      skip(skipped);
      start_next();
      finish_next<0>();
    }

    /// Walks over the tiles. Afterwards o, m and l are those of the last segment.
    __device__ __forceinline__ void walk(const Part& part, const TileWalk& block) {
      const TileWalk walk = uniform(part.walk);
      const TileWalk unmasked = uniform(part.unmasked);
      const int flags = __shfl_sync(
          0xffffffffu, (part.narrow ? 1 : 0) | (part.first_high ? 2 : 0) | (part.last_low ? 4 : 0), 0);
      restart();
      wgmma_touch(o);  // zeros now, not when products are running
      folds = 0;
      running_stage = kStages;
      if (walk.count() == 0) {
        if (block.count() > 0) release(&shared.q_empty);
        skip(block.count());
        return;
      }
      const bool narrow = kTrims && (flags & 1) != 0;
      const int last = walk.last > walk.first ? walk.last - 1 : walk.sink_tiles - 1;
      int tile = walk.sink_tiles > 0 && !narrow ? 0 : walk.first;
      segment_end = narrow ? kSegmentTiles : (tile / kSegmentTiles + 1) * kSegmentTiles;
      skip(narrow ? 0 : block.index(tile));
      if (narrow) {
        narrow_tile(block.index(tile) - 1);
      } else {
        start_next();
        finish_next<0>();
      }
      if (tile == last) release(&shared.q_empty);
      if (kTrims && (flags & 2) != 0) {
        weigh<kTile, kTile / 2, kTile>(s, weights, tile, true);
      } else {
        weigh<kTile, 0, kTile>(s, weights, tile, !unmasked.has(tile));
      }

      // The scores of the next tile beside the products of the one before it.
      const auto advance_to_next = [&] {
        // (Selections, not branches: what is chosen in a branch that waits is no longer known to be uniform.)
        const bool jump = tile + 1 == walk.sink_tiles;
        const int unseen = jump ? block.index(walk.first) - block.index(tile) - 1 : 0;
        tile = jump ? walk.first : tile + 1;
        skip(unseen);
        start_next();
        start_held<kTile>(weights);
        finish_next<1>();
        if (tile == last) release(&shared.q_empty);
      };
      const bool last_low = kTrims && (flags & 4) != 0;
      const int last_whole = last_low ? last - 1 : last;
      while (tile < last_whole) {
        advance_to_next();
        weigh<kTile, 0, kTile>(s, weights, tile, !unmasked.has(tile));
      }
      if (last_low) {
        if (tile < last) {
          advance_to_next();
          weigh<kTile, 0, kTile / 2>(s, weights, tile, true);
        }
        start_held<kTile / 2>(weights);
      } else {
        start_held<kTile>(weights);
      }
      wgmma_wait<0>();
      wgmma_touch(o);
      release(&shared.v_empty[running_stage]);
      skip(block.count() - block.index(tile) - 1);
    }

    /// Finishes the rows of this warp and stores them, and their log-sum-exps.
    __device__ __forceinline__ void finish_rows(const Work& work, const CUtensorMap& out_map) {
      end_segment();
      RowSum end[2];
      Fold fold[2];
      fold_last(end, fold);
      const Place at;
      const int lane = at.lane;
      const float sink =
          arguments.sink_logit == nullptr ? negative_infinity() : __ldg(arguments.sink_logit + work.head);
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Finish row = finish(end[r].m, end[r].l, sink);
        factor[r] = row.factor;
        const int token = work.first_token + at.row() + 8 * r;
        if (arguments.writes_lse && lane % 4 == 0 && token < work.range.q_tokens) {
          const std::int64_t i = lse_index(arguments, work.sequence, work.range.q_row, work.head, token);
          if (arguments.lse != nullptr) arguments.lse[i] = row.lse;
          if (arguments.lse_with_sink != nullptr) arguments.lse_with_sink[i] = row.lse_with_sink;
        }
      }

      // The 16 rows of a warp lie in its part of shared memory as the copy engine wants them.
      auto* staging = reinterpret_cast<unsigned char*>(&shared.own[at.warp]);
      const int row = lane / 8 % 2 * 8 + lane % 8;  // that this lane addresses, of columns 8 j or 8 j + 8
      const int first = work.first_token + at.warp * 16;
      const int rows = __shfl_sync(0xffffffffu, work.range.q_tokens - first, 0);
#pragma unroll
      for (int staged = 0; staged < kDv / kBlockColumns; staged += kStagedBlocks) {
        if (!kTotalsInShared && folds > 0)
          fold_last_columns(at, fold, staged * 8, (staged + kStagedBlocks) * 8);
        if ((folds == 0 || !kTotalsInShared) && lane == 0) tma_store_wait_read();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kStagedBlocks * 8; j += 2) {
          std::uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int r = i % 2, e = 4 * (staged * 8 + j + i / 2) + 2 * r;
            x[i] = pack<T>(output(o[e], factor[r]), output(o[e + 1], factor[r]));
          }
          const int chunk = j % 8 + lane / 16;
          store_matrices(staging + j / 8 * kStagedBlockBytes + row * 128 + (chunk ^ row % 8) * 16, x);
        }
        fence_proxy_async();
        __syncwarp();
        if (rows >= 16) {
          if (lane == 0) {
#pragma unroll
            for (int block = 0; block < kStagedBlocks; ++block) {
              tma_store(staging + block * kStagedBlockBytes, &out_map, (staged + block) * kBlockColumns,
                        work.head, work.range.q_row + first,
                        arguments.q_begin == nullptr ? work.sequence : 0);
            }
            tma_store_commit();
          }
        } else {
          store_last_rows(work, staging, staged * kBlockColumns, first, rows, lane);
        }
        __syncwarp();
      }
    }

    /// Stores the last rows of a sequence, fewer than 16: those behind them belong to the next one. From `column` on, as many
    /// columns as are staged.
    __device__ __forceinline__ void store_last_rows(const Work& work, const unsigned char* staging,
                                                    int column, int first, int rows, int lane) {
      constexpr int kChunks = kStagedBlocks * 8;  // of 16 bytes, per row
      constexpr int kRowsAtOnce = 32 / kChunks;
      static_assert(32 % kChunks == 0, "a chunk column belongs to one lane");
      const int chunk = lane % kChunks;
      auto* out = static_cast<T*>(arguments.out) +
                  out_index(arguments, work.sequence, work.range.q_row, work.head, first) + column +
                  chunk * 8;
      if (column + chunk * 8 >= arguments.d_v) rows = 0;
#pragma unroll 1
      for (int step = 0; step < 16 / kRowsAtOnce; ++step) {
        const int row = step * kRowsAtOnce + lane / kChunks;
        if (row < rows) {
          *reinterpret_cast<uint4*>(out + row * arguments.out_token) = *reinterpret_cast<const uint4*>(
              staging + chunk / 8 * kStagedBlockBytes + row * 128 + (chunk % 8 ^ row % 8) * 16);
        }
      }
    }
  };

  __device__ static void consume(const Arguments& arguments, Shared& shared, const CUtensorMap& out_map,
                                 int warpgroup) {
    Consumer consumer(arguments, shared, warpgroup);
    int q_uses = 0;
    for (int turn = 0;; ++turn) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_full[slot], turn / 2 % 2);
      const Work& work = shared.work[slot];
      if (__shfl_sync(0xffffffffu, work.sequence, 0) < 0) break;
      consumer.work = &work;
      const TileWalk block = uniform(work.walk);
      if (block.count() > 0) {
        barrier_wait(&shared.q_full, q_uses % 2);
        ++q_uses;
      }
      consumer.walk(work.part[warpgroup], block);
      consumer.finish_rows(work, out_map);
      consumer.release(&shared.work_empty[slot]);
    }
    if (consumer.lane == 0) tma_store_wait_read();  // shared memory goes away
  }
};

template <typename T, int kDqk, int kDv, bool kCap>
__global__ void __launch_bounds__((Prefill<T, kDqk, kDv, kCap>::kThreads), 1)
    prefill_kernel(const __grid_constant__ Arguments arguments, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap out_map) {
  using P = Prefill<T, kDqk, kDv, kCap>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const int warp =
      __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and known to be
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    tma_prefetch_map(&out_map);
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.q_empty, P::kConsumers / 32);
    for (int stage = 0; stage < P::kStages; ++stage) {
      barrier_init(&shared.k_full[stage], 1);
      barrier_init(&shared.k_empty[stage], P::kConsumers / 32);
      barrier_init(&shared.v_full[stage], 1);
      barrier_init(&shared.v_empty[stage], P::kConsumers / 32);
      barrier_init(&shared.v_loaded[stage], 1);
    }
    barrier_init(&shared.v_empty[P::kStages], P::kConsumers / 32);
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
    P::consume(arguments, shared, out_map, warp / 4 - 1);
  }
}

template <typename T, int kDqk, int kDv, bool kCap>
Instance prefill_instance() {
  using P = Prefill<T, kDqk, kDv, kCap>;
  return {reinterpret_cast<const void*>(&prefill_kernel<T, kDqk, kDv, kCap>), P::kThreads,
          static_cast<int>(sizeof(typename P::Shared)), P::kRows};
}

}  // namespace basin::attention::sm90
