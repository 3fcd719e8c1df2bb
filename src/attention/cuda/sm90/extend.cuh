// Attention of blocks of up to 64 query rows over many keys: the query heads of a group times some tokens. For what decode and
// prefill do not do, which is the second query of in-cache positions with any number of tokens.
//
// CTAs take segments of the keys of a block: first a fixed share, in which the CTAs of one gang, a key head each, walk the same
// tokens together (their keys lie side by side in memory), then what is left by tickets. Blocks of several segments leave their
// states in the workspace. The last CTA to arrive folds them; with many segments, all CTAs do it at the end, row by row.
//
// One warpgroup computes as in prefill. One warp finds work and loads keys, one loads values, and one counts and folds finished
// segments beside the others.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/extend_units.cuh"
#include "attention/cuda/sm90/fold.cuh"
#include "attention/cuda/sm90/fold_queue.cuh"
#include "attention/cuda/sm90/instances.h"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/rows.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// Where the states of a block of rows lie, and where its rows go. A state is block_rows x kDv accumulators, then
/// block_rows x (m, l).
template <typename T, int kDv>
struct BlockState {
  const Arguments& arguments;
  const Unit& unit;
  const int group;
  const int block_rows;
  const int floats;  // of a state
  float* const first;

  __device__ __forceinline__ BlockState(const Arguments& arguments, const Unit& unit)
      : arguments(arguments),
        unit(unit),
        group(arguments.h_q / arguments.h_kv),
        block_rows(arguments.block_tokens * group),
        floats(state_floats(block_rows, kDv)),
        first(arguments.states + block_number(arguments, unit) * arguments.max_segments * floats) {}

  __device__ __forceinline__ float* segment(int ordinal) const {
    return first + std::int64_t{ordinal} * floats;
  }
  __device__ __forceinline__ float* sums(int ordinal) const { return segment(ordinal) + block_rows * kDv; }

  /// Finishes a row that is known whole: `store(out, factor)` writes the columns that the caller has, and the caller with
  /// `writes_lse` the log-sum-exps.
  template <typename Store>
  __device__ __forceinline__ void finish_row(int row, float m, float l, bool writes_lse,
                                             const Store& store) const {
    const int token = unit.first_token + row / group, head = unit.kv_head * group + row % group;
    const Finish end = finish(m, l, sink_of(arguments, head));
    if (writes_lse && arguments.writes_lse)
      write_lse(arguments, unit.sequence, unit.range.q_row, head, token, end);
    store(static_cast<T*>(arguments.out) + out_index(arguments, unit.sequence, unit.range.q_row, head, token),
          end.factor);
  }
};

/// Folds all rows of a block that has at most kExtendSegmentsInLine segments; one warp. A lane owns four columns of some rows.
template <typename T, int kDv>
__device__ void fold_in_line(const Arguments& arguments, const Unit& unit, int lane) {
  constexpr int kAtOnce = kExtendSegmentsInLine;
  constexpr int kQuads = kDv / 4;
  constexpr int kLanes = kQuads < 32 ? kQuads : 32;  // of a row
  static_assert(kAtOnce <= kLanes, "a lane for each segment");
  const BlockState<T, kDv> state(arguments, unit);
  const int segments = unit.segments;
#pragma unroll 2
  for (int base = 0; base < unit.rows * kQuads; base += 32) {
    const int row = (base + lane) / kQuads, quad = (base + lane) % kQuads;
    const bool exists = row < unit.rows;
    float4 parts[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (n < segments && exists)
        parts[n] = __ldcg(reinterpret_cast<const float4*>(state.segment(n) + row * kDv) + quad);
    }
    const int k = lane % kLanes;  // a lane's segment
    float2 sum = make_float2(negative_infinity(), 0.0f);
    if (k < segments && exists) sum = __ldcg(reinterpret_cast<const float2*>(state.sums(k)) + row);
    float m = sum.x;
#pragma unroll
    for (int step = 1; step < kAtOnce; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, m, step, kLanes);
      if (k >= step) m = fmaxf(m, other);
    }
    const float below = __shfl_up_sync(0xffffffffu, m, 1, kLanes);
    const Fold factors = fold_of(k == 0 ? negative_infinity() : below, sum.x);
    const float l_part = __fmul_rn(sum.y, factors.b);
    m = __shfl_sync(0xffffffffu, m, kAtOnce - 1, kLanes);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float l = 0.0f;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const Fold fold{0.0f, __shfl_sync(0xffffffffu, factors.a, n, kLanes),
                      __shfl_sync(0xffffffffu, factors.b, n, kLanes)};
      const float part = __shfl_sync(0xffffffffu, l_part, n, kLanes);
      if (n >= segments) continue;
      l = __fmaf_rn(l, fold.a, part);
      o = make_float4(folded(fold, o.x, parts[n].x), folded(fold, o.y, parts[n].y),
                      folded(fold, o.z, parts[n].z), folded(fold, o.w, parts[n].w));
    }
    if (!exists) continue;
    state.finish_row(row, m, l, quad == 0, [&](T* out, float factor) {
      if (quad * 4 >= arguments.d_v) return;
      *reinterpret_cast<uint2*>(out + quad * 4) =
          make_uint2(pack<T>(output(o.x, factor), output(o.y, factor)),
                     pack<T>(output(o.z, factor), output(o.w, factor)));
    });
  }
}

template <typename T, int kDqk, int kDv, bool kCap>
struct Extend {
  static constexpr int kTile = tile_keys(kDqk);
  static constexpr int kSegmentTiles = segment_tiles(kDqk);
  static constexpr int kRows = kExtendRows;
  static constexpr int kConsumers = 128;
  static constexpr int kThreads = kConsumers + 96;
  static constexpr int kQueue = 4;  // units between the warps
  static constexpr int kStages = (224 * 1024 / 2 - 2 * kRows * kDqk) / (kTile * (kDqk + kDv));
  using Finder = UnitFinder<kTile, kSegmentTiles>;

  struct Shared {
    alignas(1024) T k[kStages][kTile * kDqk];
    alignas(1024) T v[kStages][kTile * kDv];
    // Of this unit and the next, so that loading never waits for a unit to end; or both queries of this one.
    alignas(1024) T q[2][kRows * kDqk];
    Barrier k_full[kStages], k_empty[kStages];
    Barrier v_full[kStages], v_empty[kStages];
    Barrier q_full[2], q_empty[2];
    Barrier work_full[kQueue], work_empty[kQueue];
    Barrier saved[kQueue];  // the consumers have done the work of a slot
    Unit work[kQueue];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one SM");

  // ---------------------------------------------------------------------------------------------- loading

  /// The page of this lane's box of tile i of a unit's walk.
  __device__ __forceinline__ static int page_at(const Arguments& arguments, const Unit& work, int i,
                                                int lane) {
    if (i >= work.end) return -1;
    return page_of<kTile>(arguments, work.sequence, work.range.kv_tokens, work.walk.tile(i) * kTile, lane);
  }

  /// Loads a tile of kWidth columns of keys or values into its stage.
  template <int kWidth>
  __device__ __forceinline__ static void load(const Arguments& arguments, const CUtensorMap& map,
                                              const Unit& work, int i, int page, RingPlace<kStages>& place,
                                              T* stages, Barrier* full, Barrier* empty, int lane) {
    barrier_wait(empty + place.slot, place.parity ^ 1);
    load_keys<kTile, kWidth>(arguments, map, stages + place.slot * kTile * kWidth, full + place.slot,
                             work.sequence, work.range, work.kv_head, work.walk.tile(i) * kTile, page,
                             kEvictNormal, lane);
    place.advance();
  }

  /// Queues units and loads their queries and keys.
  struct Loader {
    const Arguments& arguments;
    Shared& shared;
    const CUtensorMap &q_map, &q_sink_map, &k_map;
    int lane;
    int turn = 0;
    RingPlace<kStages> place;
    int queries = 0;

    /// `ahead(step)` is called with steps 0, 1, ... until the unit is loaded.
    template <typename Ahead>
    __device__ __forceinline__ void issue(const Unit& work, int page, const Ahead& ahead) {
      const int slot = turn % kQueue;
      barrier_wait(&shared.work_empty[slot], (turn / kQueue + 1) % 2);
      if (lane == 0) {
        shared.work[slot] = work;
        barrier_arrive(&shared.work_full[slot]);
      }
      ++turn;
      if (work.sequence < 0) return;
      if (work.row < 0 && work.first == work.end) load_query(work);
      for (int i = work.first; i < work.end; ++i) {
        const int next_page = page_at(arguments, work, i + 1, lane);
        load<kDqk>(arguments, k_map, work, i, page, place, shared.k[0], shared.k_full, shared.k_empty, lane);
        if (i == work.first) load_query(work);
        page = next_page;
        ahead(i - work.first);
      }
    }

    /// Waits until everything that was queued is done.
    __device__ __forceinline__ void drain() {
      for (int i = max(turn - kQueue, 0); i < turn; ++i)
        barrier_wait(&shared.work_empty[i % kQueue], i / kQueue % 2);
    }

    __device__ __forceinline__ void load_query(const Unit& work) {
      const int buffer = arguments.has_q_sink ? 0 : queries % 2;
      const int use = arguments.has_q_sink ? queries : queries / 2;
      barrier_wait(&shared.q_empty[buffer], (use + 1) % 2);
      ++queries;
      if (lane != 0) return;
      const int group = arguments.h_q / arguments.h_kv;
      const int bytes = arguments.block_tokens * group * kDqk * static_cast<int>(sizeof(T));
      barrier_arrive_expect(&shared.q_full[buffer], arguments.has_q_sink ? 2 * bytes : bytes);
      const int page = arguments.q_begin == nullptr ? work.sequence : 0;
      for (int column = 0; column < kDqk; column += kBlockColumns) {
        tma_load(shared.q[buffer] + column * kRows, &q_map, &shared.q_full[buffer], column,
                 work.kv_head * group, work.range.q_row + work.first_token, page, kEvictNormal);
        if (arguments.has_q_sink) {
          tma_load(shared.q[1] + column * kRows, &q_sink_map, &shared.q_full[buffer], column,
                   work.kv_head * group, work.range.q_row + work.first_token, page, kEvictNormal);
        }
      }
    }
  };

  /// Loads values; one warp.
  __device__ static void load_values(const Arguments& arguments, const CUtensorMap& v_map, Shared& shared,
                                     int lane) {
    RingPlace<kStages> place;
    for (int turn = 0;; ++turn) {
      const int slot = turn % kQueue;
      barrier_wait(&shared.work_full[slot], turn / kQueue % 2);
      const Unit& work = shared.work[slot];
      if (work.sequence < 0) return;
      if (work.row < 0) {
        const int first = work.first, end = work.end;
        int page = page_at(arguments, work, first, lane);
        for (int i = first; i < end; ++i) {
          const int next_page = page_at(arguments, work, i + 1, lane);
          load<kDv>(arguments, v_map, work, i, page, place, shared.v[0], shared.v_full, shared.v_empty, lane);
          page = next_page;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }

  /// Finds work and loads queries and keys; one warp.
  __device__ static void feed(const Arguments& arguments, const CUtensorMap& q_map,
                              const CUtensorMap& q_sink_map, const CUtensorMap& k_map, Shared& shared,
                              int lane) {
    Loader loader{arguments, shared, q_map, q_sink_map, k_map, lane};
    UnitSource<Finder> source(arguments, lane);
    Unit work;
    work.sequence = -1;
    int page = -1;
    for (bool begun = false;; begun = true) {
      // The next unit is drawn and found while this one is loaded: each of its trips to memory takes as long as a tile.
      Unit next;
      int next_page = -1;
      int steps = 0;
      const auto ahead = [&](int step) {
        steps = step + 1;
        if (step == 0) source.draw();
        if (step == 1) next = source.take();
        if (step == 2) next_page = page_at(arguments, next, next.first, lane);
      };
      if (begun) loader.issue(work, page, ahead);
#pragma unroll 1
      for (int step = steps; step < 3; ++step) ahead(step);
      work = next;
      page = next_page;
      if (work.sequence < 0) break;
    }
    FoldQueue queue = queue_of(arguments);
    const int blocks = source.folded_blocks();
    if (blocks > 0) {
      loader.drain();
      for (int2 found = queue.take(blocks, lane); found.x >= 0; found = queue.take(blocks, lane)) {
        const int block = found.x / arguments.h_kv;
        Unit fold = Finder::describe_block(arguments, block / arguments.max_blocks,
                                           block % arguments.max_blocks, found.x % arguments.h_kv);
        fold.row = found.y;
        if (fold.row < fold.rows) loader.issue(fold, -1, [](int) {});
      }
    }
    loader.drain();
    loader.issue(work, page, [](int) {});
    source.finish(queue);
  }

  __device__ __forceinline__ static FoldQueue queue_of(const Arguments& arguments) {
    return FoldQueue(arguments.counters, arguments.block_tokens * (arguments.h_q / arguments.h_kv));
  }

  // ------------------------------------------------------------------------------------------- arithmetic

  /// The warpgroup that computes. Warps without rows take part in the products only.
  struct Consumer {
    const Arguments& arguments;
    Shared& shared;
    const int warp;
    const int lane;

    RingPlace<kStages> keys, values;  // of the tiles to come
    float s[kTile / 2];
    float o[kDv / 2];
    std::uint32_t weights[kTile / kStepKeys][4];
    float m[2];
    float l[2][2];  // key mod 8 = 2 c and 2 c + 1

    __device__ __forceinline__ void release(Barrier* barrier) const {
      if (lane == 0) barrier_arrive(barrier);
    }
    __device__ __forceinline__ int row(int r) const { return 16 * warp + lane / 4 + 8 * r; }

    __device__ __forceinline__ void restart() {
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;
      wgmma_touch(o);
#pragma unroll
      for (int r = 0; r < 2; ++r) m[r] = negative_infinity(), l[r][0] = l[r][1] = 0.0f;
    }

    /// Keys of a tile that the second query scores: those below sink_tokens, when there is one.
    __device__ __forceinline__ int keys_of_sink(int tile) const {
      return arguments.has_q_sink ? arguments.sink_tokens - tile * kTile : 0;
    }

    __device__ __forceinline__ void start_next(int tile, int buffer) {
      barrier_wait(&shared.k_full[keys.slot], keys.parity);
      start_scores<T, kDqk, kTile, kRows, kTile>(s, shared.q[keys_of_sink(tile) > 0 ? 1 : buffer],
                                                 shared.k[keys.slot]);
    }
    /// The scores have arrived, when all but `kRunning` groups of products have. The one tile that both queries score is scored
    /// again here.
    template <int kRunning>
    __device__ __forceinline__ void finish_next(int tile, int buffer) {
      wgmma_wait<kRunning>();
      wgmma_touch(s);
      const int from_sink = uniform(keys_of_sink(tile));
      if (from_sink > 0 && from_sink < kTile) [[unlikely]] {
        wgmma_wait<0>();
        wgmma_touch(o);
        constexpr int kHalf = kTile / 2;  // keys; registers hold no more beside the rest
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float other[kHalf / 2];
          start_scores<T, kDqk, kHalf, kRows, kTile>(other, shared.q[buffer],
                                                     shared.k[keys.slot] + half * kHalf * kBlockColumns);
          wgmma_wait<0>();
          wgmma_touch(other);
#pragma unroll
          for (int i = 0; i < kHalf / 2; ++i) {
            if (half * kHalf + i / 4 * 8 + lane % 4 * 2 + i % 2 >= from_sink)
              s[half * kHalf / 2 + i] = other[i];
          }
        }
      }
      release(&shared.k_empty[keys.slot]);
      keys.advance();
    }

    /// Scores become weights, m and l advance, and O, when the products that run have ended, is made ready for them. Of a
    /// thread's two rows the first kThreadRows exist.
    template <int kThreadRows>
    __device__ __forceinline__ void weigh(const Unit& work, int tile, bool masked) {
      const auto mine = [](int i) { return i / 2 % 2 < kThreadRows; };
      if constexpr (kCap) {
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i) {
          if (mine(i)) s[i] = soft_cap(s[i], arguments.cap_factor);
        }
      }
      if (masked) [[unlikely]] {
        const int group = arguments.h_q / arguments.h_kv;
        const int key = tile * kTile + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
          const RowKeys seen = row_keys(arguments, work.p_first + row(r) / group, work.range.kv_tokens);
          mask_row<0, kTile>(s, r, seen_columns<kTile>(seen, key));
        }
      }
      float maximum[2], shift[2], rescale[2] = {1.0f, 1.0f};
      row_maxima<0, kTile, kThreadRows>(s, maximum);
      bool moved = false;
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const float next = next_maximum(m[r], __fmul_rn(maximum[r], arguments.score_factor));
        shift[r] = shift_of(next);
        rescale[r] = exp2_fast(__fadd_rn(m[r], -shift[r]));
        // (-inf: O is 0 still. Rows that do not exist hold anything.)
        moved |= rescale[r] != 1.0f && m[r] != negative_infinity() && row(r) < work.rows;
        m[r] = next;
      }
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        if (mine(i)) s[i] = probability(s[i], arguments.score_factor, shift[i / 2 % 2]);
      }
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) l[r][e] = add_tile(l[r][e], rescale[r], sum_of<0, kTile>(s, 2 * r + e));
      }
      if (__any_sync(0xffffffffu, moved)) [[unlikely]] {
        wgmma_wait<0>();
        wgmma_touch(o);
#pragma unroll
        for (int i = 0; i < kDv / 2; ++i) o[i] = __fmul_rn(o[i], rescale[i / 2 % 2]);
      }
      wgmma_wait<0>();
      wgmma_touch(o);
#pragma unroll
      for (int step = 0; step < kTile / kStepKeys; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i % 2 < kThreadRows) weights[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
        }
      }
    }

    /// Computes a segment: afterwards o, m and l are its state.
    __device__ __forceinline__ void compute(const Unit& work, int buffer) {
      restart();
      const TileWalk walk = uniform(work.walk);
      const int first = uniform(work.first), end = uniform(work.end), rows = uniform(work.rows);
      if (first == end) return;
      const TileWalk unmasked = uniform(unmasked_tiles<kTile>(
          arguments, work.p_first, work.p_first + arguments.block_tokens - 1, work.range.kv_tokens));
      int running = -1;  // stage of the values that the tensor cores read
      const auto take = [&](int tile) {
        const bool masked = !unmasked.has(tile);
        if (rows - 16 * warp > 8) {
          weigh<2>(work, tile, masked);
        } else if (rows > 16 * warp) {
          weigh<1>(work, tile, masked);
        } else {
          wgmma_wait<0>();
          wgmma_touch(o);
        }
#pragma unroll
        for (auto& step : weights) wgmma_touch(step);  // now, not when products are running
        if (running >= 0) release(&shared.v_empty[running]);
      };
      const auto start_products = [&](int tile) {
        running = values.slot;
        barrier_wait(&shared.v_full[running], values.parity);
        values.advance();
        if (!work.live.all(tile * kTile, kTile)) [[unlikely]] {
          // Values that no row may see must be 0, not merely be multiplied by 0.
          clear_dead_rows<kTile, kDv>(shared.v[running], work.live, tile * kTile, 32 * warp + lane,
                                      kConsumers);
          fence_proxy_async();
          named_barrier_sync(1, kConsumers);
        }
        start_values<T, kDv, kTile, kTile>(o, weights, shared.v[running]);
      };
      start_next(walk.tile(first), buffer);
      finish_next<0>(walk.tile(first), buffer);
      take(walk.tile(first));
#pragma unroll 1
      for (int at = first + 1; at < end; ++at) {
        start_next(walk.tile(at), buffer);
        start_products(walk.tile(at - 1));
        finish_next<1>(walk.tile(at), buffer);
        take(walk.tile(at));
      }
      start_products(walk.tile(end - 1));
      wgmma_wait<0>();
      wgmma_touch(o);
      release(&shared.v_empty[running]);
    }

    /// Writes the rows of a unit: finished, if the segment is all of them, or its state.
    __device__ __forceinline__ void write(const Unit& work) {
      const bool whole = work.segments == 1;
      const BlockState<T, kDv> state(arguments, work);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = __fadd_rn(l[r][0], l[r][1]);
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (row(r) >= work.rows) continue;
        if (whole) {
          state.finish_row(row(r), m[r], sum, lane % 4 == 0, [&](auto* out, float factor) {
#pragma unroll
            for (int j = 0; j < kDv / 8; ++j) {
              const int column = 8 * j + lane % 4 * 2;
              if (column < arguments.d_v) {
                *reinterpret_cast<std::uint32_t*>(out + column) =
                    pack<T>(output(o[4 * j + 2 * r], factor), output(o[4 * j + 2 * r + 1], factor));
              }
            }
          });
        } else {
          float* saved = state.segment(work.ordinal);
#pragma unroll
          for (int j = 0; j < kDv / 8; ++j) {
            __stcg(reinterpret_cast<float2*>(saved + row(r) * kDv + 8 * j + lane % 4 * 2),
                   make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]));
          }
          if (lane % 4 == 0)
            __stcg(reinterpret_cast<float2*>(state.sums(work.ordinal)) + row(r), make_float2(m[r], sum));
        }
      }
    }
  };

  __device__ static void consume(const Arguments& arguments, Shared& shared, int warp, int lane) {
    Consumer consumer{arguments, shared, warp, lane, {}, {}, {}, {}, {}, {}, {}};
    int queries = 0;
    for (int turn = 0;; ++turn) {
      const int slot = turn % kQueue;
      barrier_wait(&shared.work_full[slot], turn / kQueue % 2);
      const Unit& work = shared.work[slot];
      if (uniform(work.sequence) < 0) return;
      if (uniform(work.row) >= 0) {
        // No tiles come any more: their memory is free.
        const BlockState<T, kDv> state(arguments, work);
        const int thread = 32 * warp + lane;
        constexpr int kAtOnce = fold_segments(kDv, kConsumers, kConsumers);
        static_assert(fold_bytes(kDv, kAtOnce) <= sizeof(shared.k));
        fold_row<kDv, kConsumers>(state.first, state.floats, state.block_rows, work.row, work.segments,
                                  shared.k, kAtOnce, thread, [&](float m, float l, const auto& o) {
                                    state.finish_row(work.row, m, l, thread == 0, [&](T* out, float factor) {
#pragma unroll
                                      for (int i = 0; i < (kDv + kConsumers - 1) / kConsumers; ++i) {
                                        const int column = i * kConsumers + thread;
                                        if (column < arguments.d_v) out[column] = T(output(o[i], factor));
                                      }
                                    });
                                  });
      } else {
        const int buffer = arguments.has_q_sink ? 0 : queries % 2;
        const int use = arguments.has_q_sink ? queries : queries / 2;
        barrier_wait(&shared.q_full[buffer], use % 2);
        ++queries;
        consumer.compute(work, buffer);
        consumer.release(&shared.q_empty[buffer]);
        consumer.write(work);
      }
      __syncwarp();
      consumer.release(&shared.saved[slot]);
      consumer.release(&shared.work_empty[slot]);
    }
  }

  /// Counts the saved segments, beside the consumers, who go on; with the last one of a block, folds it or puts it into the queue.
  /// One warp.
  __device__ static void count_segments(const Arguments& arguments, Shared& shared, int lane) {
    const FoldQueue queue = queue_of(arguments);
    for (int turn = 0;; ++turn) {
      const int slot = turn % kQueue;
      barrier_wait(&shared.work_full[slot], turn / kQueue % 2);
      const Unit& work = shared.work[slot];
      if (uniform(work.sequence) < 0) return;
      barrier_wait(&shared.saved[slot], turn / kQueue % 2);
      if (work.row < 0 && work.segments > 1) {
        bool last = false;
        if (lane == 0) {
          std::uint32_t* saved = queue.saved(block_number(arguments, work));
          last = counter_next(saved) == static_cast<std::uint32_t>(work.segments) - 1;
          if (last) atomicExch(saved, 0u);  // (it may count rows from here on)
          if (last && !work.in_line) queue.put(block_number(arguments, work));
        }
        last = __any_sync(0xffffffffu, last);
        __syncwarp();  // what lane 0 has acquired
        if (last && work.in_line) fold_in_line<T, kDv>(arguments, work, lane);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }
};

template <typename T, int kDqk, int kDv, bool kCap>
__global__ void __launch_bounds__((Extend<T, kDqk, kDv, kCap>::kThreads), 1)
    extend_kernel(const __grid_constant__ Arguments arguments, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap q_sink_map, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map) {
  using E = Extend<T, kDqk, kDv, kCap>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename E::Shared*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kWarps = E::kConsumers / 32;
  if (threadIdx.x == E::kConsumers) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    for (int stage = 0; stage < E::kStages; ++stage) {
      barrier_init(&shared.k_full[stage], 1);
      barrier_init(&shared.k_empty[stage], kWarps);
      barrier_init(&shared.v_full[stage], 1);
      barrier_init(&shared.v_empty[stage], kWarps);
    }
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(&shared.q_full[buffer], 1);
      barrier_init(&shared.q_empty[buffer], kWarps);
    }
    for (int slot = 0; slot < E::kQueue; ++slot) {
      barrier_init(&shared.work_full[slot], 1);
      barrier_init(&shared.work_empty[slot], kWarps + 2);
      barrier_init(&shared.saved[slot], kWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warp < kWarps) {
    E::consume(arguments, shared, warp, lane);
  } else if (warp == kWarps) {
    E::feed(arguments, q_map, q_sink_map, k_map, shared, lane);
  } else if (warp == kWarps + 1) {
    E::load_values(arguments, v_map, shared, lane);
  } else {
    E::count_segments(arguments, shared, lane);
  }
}

template <typename T, int kDqk, int kDv, bool kCap>
Instance extend_instance() {
  using E = Extend<T, kDqk, kDv, kCap>;
  return {reinterpret_cast<const void*>(&extend_kernel<T, kDqk, kDv, kCap>), E::kThreads,
          static_cast<int>(sizeof(typename E::Shared)), E::kRows};
}

}  // namespace basin::attention::sm90
