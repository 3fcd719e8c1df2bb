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
#include "attention/cuda/sm90/prefill_feed.cuh"
#include "attention/cuda/sm90/prefill_layout.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/rows.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// The warpgroups of prefill that compute.
template <typename T, int kDqk, int kDv, bool kCap>
struct Prefill {
  using L = PrefillLayout<T, kDqk, kDv, kCap>;
  using Part = typename L::Part;
  using Work = typename L::Work;
  using RowSum = typename L::RowSum;
  using Total = typename L::Total;
  using Shared = typename L::Shared;
  static constexpr int kTile = L::kTile;
  static constexpr int kSegmentTiles = L::kSegmentTiles;
  static constexpr int kRows = L::kRows;
  static constexpr int kConsumers = L::kConsumers;
  static constexpr int kStages = L::kStages;
  static constexpr int kTotalsAtOnce = L::kTotalsAtOnce;
  static constexpr int kStagedBlocks = L::kStagedBlocks;
  static constexpr int kStagedBlockBytes = L::kStagedBlockBytes;
  static constexpr bool kTotalsInShared = L::kTotalsInShared;
  static constexpr bool kParksSums = L::kParksSums;
  static constexpr bool kTrims = L::kTrims;
  static constexpr bool kRoundsFirst = L::kRoundsFirst;
  static constexpr bool kHasPlainLoop = L::kHasPlainLoop;

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

    /// Sums are made now: later, the probabilities would live on beside the weights.
    __device__ __forceinline__ static void pin(float4& sums) {
      asm volatile("" : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w));
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
          total[i][at.lane] = make_float4(folded(low, t.x, o[4 * i]), folded(low, t.y, o[4 * i + 1]),
                                          folded(high, t.z, o[4 * i + 2]), folded(high, t.w, o[4 * i + 3]));
        }
        if (at.lane % 4 == 0) {
          sums[0] = {low.m, folded(low, low_total.l, done[0].l)};
          sums[8] = {high.m, folded(high, high_total.l, done[8].l)};
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
      end[0] = {fold[0].m, folded(fold[0], low_total.l, end[0].l)};
      end[1] = {fold[1].m, folded(fold[1], high_total.l, end[1].l)};
    }
    /// Eights of columns [begin, end) of it, in o.
    __device__ __forceinline__ void fold_last_columns(const Place& at, const Fold (&fold)[2], int begin,
                                                      int end) {
      const Total& total = total_of(at.warp);
#pragma unroll
      for (int i = begin; i < end; ++i) {
        if (i > begin && (i - begin) % kTotalsAtOnce == 0) __syncwarp();
        const float4 t = total[i][at.lane];
        o[4 * i] = folded(fold[0], t.x, o[4 * i]);
        o[4 * i + 1] = folded(fold[0], t.y, o[4 * i + 1]);
        o[4 * i + 2] = folded(fold[1], t.z, o[4 * i + 2]);
        o[4 * i + 3] = folded(fold[1], t.w, o[4 * i + 3]);
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
      if constexpr (!kParksSums) pin(kept_sums);
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

    /// The same for a tile that every row sees whole and that begins no segment, in as few instructions as that takes; l is `l`.
    __device__ __forceinline__ void weigh_plain(float4& l) {
      float maximum[2], next[2];
      row_maxima<0, kTile>(s, maximum);
      bool moved = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        next[r] = next_maximum(m[r], __fmul_rn(maximum[r], arguments.score_factor));
        moved |= next[r] != m[r];
      }
      const float shift[2] = {shift_of(next[0]), shift_of(next[1])};
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) s[i] = probability(s[i], arguments.score_factor, shift[i / 2 % 2]);
      const float4 sum = {sum_of<0, kTile>(s, 0), sum_of<0, kTile>(s, 1), sum_of<0, kTile>(s, 2),
                          sum_of<0, kTile>(s, 3)};
      if (__any_sync(0xffffffffu, moved)) [[unlikely]] {
        wgmma_wait<0>();
        wgmma_touch(o);
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) rescale[r] = exp2_fast(__fadd_rn(m[r], -shift[r])), m[r] = next[r];
#pragma unroll
        for (int i = 0; i < kDv / 2; ++i) o[i] = __fmul_rn(o[i], rescale[i / 2 % 2]);
        l = {add_tile(l.x, rescale[0], sum.x), add_tile(l.y, rescale[0], sum.y),
             add_tile(l.z, rescale[1], sum.z), add_tile(l.w, rescale[1], sum.w)};
      } else {
        l = {add_tile(l.x, 1.0f, sum.x), add_tile(l.y, 1.0f, sum.y), add_tile(l.z, 1.0f, sum.z),
             add_tile(l.w, 1.0f, sum.w)};
      }
      pin(l);
      wgmma_wait<0>();
      wgmma_touch(o);
      release(&shared.v_empty[running_stage]);
#pragma unroll
      for (int step = 0; step < kTile / kStepKeys; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
      }
    }

    /// Starts O += P V with the first kKeys keys of the held tile.
    template <int kKeys, int kSteps>
    __device__ __forceinline__ void start_held(const std::uint32_t (&w)[kSteps][4]) {
      running_stage = static_cast<int>(stage(held));
      barrier_wait(&shared.v_full[running_stage], parity(held));
      start_values<T, kDv, kKeys, kTile>(o, w, shared.v[running_stage]);
    }

    /// A first tile that holds a few sink tokens and nothing else takes one step of keys instead of eight: the others would
    /// multiply zeros, and leaving them out changes no bit. Its O += P V runs beside the scores of the next tile, `skipped`
    /// tiles on.
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

    /// Goes on from `tile` over tiles next to each other that every row sees whole and that begin no segment, up to `end`: products and
    /// weights, nothing else. There is at least one. Returns the last one.
    __device__ __forceinline__ int walk_plain(int tile, int end) {
      const std::uint64_t first_keys = swizzled_operand(shared.k[0], 0);
      constexpr unsigned kStageBytes = sizeof(shared.k[0]);
      float4 l = sums();
      std::uint32_t arrived = 0;  // keys of the next tile, when they were last looked for
#pragma unroll 1
      do {
        ++tile;
        barrier_wait_unless(arrived, &shared.k_full[stage(next)], parity(next));
        start_scores<T, kDqk, kTile, kRows, kTile>(s, queries(),
                                                   advance(first_keys, stage(next) * kStageBytes));
        start_held<kTile>(weights);
        finish_next<1>();
        arrived = barrier_test(&shared.k_full[stage(next)], parity(next));
        weigh_plain(l);
      } while (tile + 1 < end);
      keep_sums(l);
      return tile;
    }

    /// Walks over the tiles. Afterwards o, m and l are those of the last segment.
    __device__ __forceinline__ void walk(const Part& part, const TileWalk& block) {
      const TileWalk walk = uniform(part.walk);
      const TileWalk unmasked = uniform(part.unmasked);
      const int flags = uniform((part.narrow ? 1 : 0) | (part.first_high ? 2 : 0) | (part.last_low ? 4 : 0));
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
        if constexpr (kHasPlainLoop) {
          const int end = min(min(unmasked.last, segment_end), last_whole);
          if (tile >= walk.first && tile + 1 >= unmasked.first && tile + 1 < end)
            tile = walk_plain(tile, end);
        }
        if (tile == last_whole) break;
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
      const float sink = sink_of(arguments, work.head);
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Finish row = finish(end[r].m, end[r].l, sink);
        factor[r] = row.factor;
        const int token = work.first_token + at.row() + 8 * r;
        if (arguments.writes_lse && lane % 4 == 0 && token < work.range.q_tokens) {
          write_lse(arguments, work.sequence, work.range.q_row, work.head, token, row);
        }
      }

      // The 16 rows of a warp lie in its part of shared memory as the copy engine wants them.
      auto* staging = reinterpret_cast<unsigned char*>(&shared.own[at.warp]);
      const int row = lane / 8 % 2 * 8 + lane % 8;  // that this lane addresses, of columns 8 j or 8 j + 8
      const int first = work.first_token + at.warp * 16;
      const int rows = uniform(work.range.q_tokens - first);
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
      if (uniform(work.sequence) < 0) break;
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
__global__ void __launch_bounds__((PrefillLayout<T, kDqk, kDv, kCap>::kThreads), 1)
    prefill_kernel(const __grid_constant__ Arguments arguments, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap out_map) {
  using P = PrefillLayout<T, kDqk, kDv, kCap>;
  using Feed = PrefillFeed<P>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
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
    if (warp == 0) Feed::hand_out(arguments, shared, static_cast<int>(threadIdx.x) % 32);
    if (warp == 1) Feed::load(arguments, q_map, k_map, v_map, shared, static_cast<int>(threadIdx.x) % 32);
    if (warp == 2) Feed::clear(arguments, shared, static_cast<int>(threadIdx.x) % 32);
  } else {
    registers_grow<P::kConsumerRegisters>();
    Prefill<T, kDqk, kDv, kCap>::consume(arguments, shared, out_map, warp / 4 - 1);
  }
}

template <typename T, int kDqk, int kDv, bool kCap>
Instance prefill_instance() {
  using P = PrefillLayout<T, kDqk, kDv, kCap>;
  return {reinterpret_cast<const void*>(&prefill_kernel<T, kDqk, kDv, kCap>), P::kThreads,
          static_cast<int>(sizeof(typename P::Shared)), P::kRows};
}

}  // namespace basin::attention::sm90
