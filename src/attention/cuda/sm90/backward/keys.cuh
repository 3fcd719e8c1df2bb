// dk and dv: one CTA per (sequence, key head, block of keys). It walks over the query rows that see its keys, of all query heads of
// the group, the last rows first; so both stay in registers from the first row to the last, and nothing of them is summed elsewhere.
//
// All products have keys in M: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers as the tensor cores want them for
// dV += P^T dO and dK += dS^T Q. With kSums, dS^T also goes through shared memory for dQ = dS K, whose shares are added from
// registers to sums in L2, in the order of the blocks of keys (keys_feed.cuh says when); the last block stores dq.
#pragma once

#include "attention/cuda/sm90/backward/instances.h"
#include "attention/cuda/sm90/backward/keys_feed.cuh"
#include "attention/cuda/sm90/backward/keys_layout.cuh"
#include "attention/cuda/sm90/backward/store_rows.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/grid.cuh"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/rows.cuh"

namespace basin::attention::sm90 {

/// One warpgroup's 64 keys. A thread holds keys g and g + 8 of its warp's 16, and of each eight query rows the two from 2 c on.
template <typename L, bool kWantsDk, bool kWantsDv>
struct KeysConsumer {
  using T = typename L::Element;
  using Shared = typename L::Shared;
  static constexpr int kDqk = L::kDqk, kDv = L::kDv, kRows = L::kRows, kKeys = L::kKeys, kStages = L::kStages;
  static constexpr int kSteps = kRows / kStepKeys;
  static constexpr bool kCap = L::kCap, kSums = L::kSums;

  const BackwardArguments& arguments;
  Shared& shared;
  const KeyBlock& work;
  const int warpgroup;
  const int lane_ = static_cast<int>(threadIdx.x) % 32;

  const int own;  // the first of the warpgroup's keys in the block

  __device__ __forceinline__ KeysConsumer(const BackwardArguments& arguments, Shared& shared, int warpgroup)
      : arguments(arguments),
        shared(shared),
        work(shared.work),
        warpgroup(warpgroup),
        own(L::kSplitsProducts || (!kSums && uniform(work.takes_turns ? 1 : 0) != 0) ? 0 : 64 * warpgroup) {}

  /// The first key of the warpgroup, and its rows.
  __device__ __forceinline__ int first_key() const { return work.first_key + own; }
  __device__ __forceinline__ const T* keys() const { return shared.k + own * kBlockColumns; }
  __device__ __forceinline__ const T* values() const { return shared.v + own * kBlockColumns; }
  /// Of the warpgroup, and of its thread; computed where they are needed, where registers are too few to keep them.
  __device__ __forceinline__ static int warp() { return thread() / 32 % 4; }
  __device__ __forceinline__ int lane() const {
    if constexpr (kSums) return thread() % 32;
    return lane_;
  }
  __device__ __forceinline__ static int thread() {
    int thread = static_cast<int>(threadIdx.x);
    recompute_from(thread);
    return thread;
  }

  __device__ __forceinline__ void release(Barrier* barrier) const {
    if (lane() == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ static unsigned stage(unsigned n) { return n % kStages; }
  __device__ __forceinline__ static unsigned parity(unsigned n) { return n / kStages % 2; }

  /// Not every row of a tile that starts at position p sees every one of these keys.
  __device__ __forceinline__ bool is_masked(int p) const {
    const int last_key = first_key() + 63;
    if (last_key >= work.range.kv_tokens) return true;
    const SeenFrom low = seen_from(arguments, first_key(), work.range.kv_tokens);
    const SeenFrom high = seen_from(arguments, last_key, work.range.kv_tokens);
    int end = min(low.end, high.end);
    // The window of the first key that is no sink token ends first.
    if (first_key() < arguments.sink_tokens && last_key >= arguments.sink_tokens)
      end = min(end, seen_from(arguments, arguments.sink_tokens, work.range.kv_tokens).end);
    return max(low.begin, high.begin) > p || end < p + kRows;
  }

  __device__ __forceinline__ void mask(float (&s)[kRows / 2], int p) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SeenFrom seen =
          seen_from(arguments, first_key() + warp() * 16 + lane() / 4 + 8 * r, work.range.kv_tokens);
      mask_row<0, kRows>(s, r, seen_columns<kRows>({kFarBefore, seen.begin, seen.end}, p + lane() % 4 * 2));
    }
  }

  __device__ __forceinline__ float weight(float x, float lse2) const {
    return exp2_fast(__fmaf_rn(x, arguments.score_factor, -lse2));
  }

  /// Scores become weights P^T; with a cap they become capped scores, and the weights are made of them where they are needed.
  __device__ __forceinline__ void weigh(float (&s)[kRows / 2], std::uint32_t (&p)[kSteps][4],
                                        const float* lse2, int position) const {
    if constexpr (kCap) {
#pragma unroll
      for (float& x : s) x = soft_cap(x, arguments.cap_factor);
    }
    if (is_masked(position)) mask(s, position);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * j + lane() % 4 * 2);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = weight(s[4 * j + e], e % 2 == 0 ? l.x : l.y);
        if constexpr (!kCap) s[4 * j + e] = x[e];
      }
      p[j / 2][j % 2 * 2] = pack<T>(x[0], x[1]);
      p[j / 2][j % 2 * 2 + 1] = pack<T>(x[2], x[3]);
    }
  }

  /// dS^T = P^T (dP^T - D), and the slope of the cap.
  __device__ __forceinline__ void differentiate(const float (&s)[kRows / 2], const float (&dp)[kRows / 2],
                                                std::uint32_t (&ds)[kSteps][4], const float* lse2,
                                                const float* big_d) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(big_d + 8 * j + lane() % 4 * 2);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float p = s[4 * j + e], slope = 1.0f;
        if constexpr (kCap) {
          const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * j + lane() % 4 * 2);
          slope = p == negative_infinity() ? 0.0f : __fmaf_rn(-p, p, 1.0f);
          p = weight(p, e % 2 == 0 ? l.x : l.y);
        }
        x[e] = __fmul_rn(p, __fadd_rn(dp[4 * j + e], -(e % 2 == 0 ? d.x : d.y)));
        if constexpr (kCap) x[e] = __fmul_rn(x[e], slope);
      }
      ds[j / 2][j % 2 * 2] = pack<T>(x[0], x[1]);
      ds[j / 2][j % 2 * 2 + 1] = pack<T>(x[2], x[3]);
    }
  }

  __device__ __forceinline__ void store_ds(const std::uint32_t (&ds)[kSteps][4], unsigned n) const {
    const unsigned buffer = n % L::kDsBuffers;
    barrier_wait(&shared.ds_empty[buffer], (n / L::kDsBuffers + 1) % 2);
    const int row =
        warpgroup * 64 + warp() * 16 + lane() / 8 % 2 * 8 + lane() % 8;  // that this lane addresses
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int block = step / 4, chunk = step % 4 * 2 + lane() / 16;
      auto* rows = reinterpret_cast<unsigned char*>(shared.ds[buffer] + block * kKeys * kUnitRows);
      store_matrices(rows + row * 128 + (chunk ^ row % 8) * 16, ds[step]);
    }
    fence_proxy_async();
    __syncwarp();
    release(&shared.ds_full[buffer]);
  }

  /// Starts dQ = dS K for this warpgroup's unit, when dS of all keys is there.
  __device__ __forceinline__ void start_dq(float (&dq)[32], unsigned n) const {
    const unsigned buffer = n % L::kDsBuffers;
    barrier_wait(&shared.ds_full[buffer], n / L::kDsBuffers % 2);
    const std::uint64_t a =
        swizzled_operand(shared.ds[buffer] + (L::kUnitsAreRows ? warpgroup * kKeys * kUnitRows : 0), 0);
    const std::uint64_t b =
        swizzled_operand(shared.k + (L::kUnitsAreRows ? 0 : warpgroup * kKeys * kBlockColumns), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / kStepKeys; ++step) {
      Wgmma<64>::template shared<T, Major::mn, Major::mn>(dq, advance(a, step * kStepKeys * 128),
                                                          advance(b, step * kStepKeys * 128), step != 0);
    }
    wgmma_commit();
  }

  /// The last share of a unit: with it dq is complete.
  __device__ __forceinline__ void finish_dq(float (&dq)[32], const DqUnit& unit) const {
    if (!unit.is_first) {
      const float4* sum = shared.sum[warpgroup] + warp() * 32 + lane();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = sum[i * 128];
        dq[4 * i] = __fadd_rn(x.x, dq[4 * i]);
        dq[4 * i + 1] = __fadd_rn(x.y, dq[4 * i + 1]);
        dq[4 * i + 2] = __fadd_rn(x.z, dq[4 * i + 2]);
        dq[4 * i + 3] = __fadd_rn(x.w, dq[4 * i + 3]);
      }
    }
    const int row = unit.first_row + warp() * 16 + lane() / 4;
    T* first =
        static_cast<T*>(arguments.dq.data) + row_index(arguments.dq, arguments.q_begin != nullptr,
                                                       work.sequence, work.range.q_row, unit.head, row);
    const RowPair<T> rows = {first, arguments.dq.token, row < work.range.q_tokens,
                             row + 8 < work.range.q_tokens, arguments.d_qk};
    store_rows(dq, arguments.scale, rows, unit.first_column, lane());
  }

  /// Adds this warpgroup's share of a unit of dq to its sum, when its turn has come; with the last one it stores dq.
  __device__ __forceinline__ void hand_over_dq(float (&dq)[32], unsigned n) const {
    release(&shared.ds_empty[n % L::kDsBuffers]);
    barrier_wait(&shared.turn_come[warpgroup], n % 2);
    const DqUnit& unit = shared.unit[warpgroup];
    float4* sum = unit.sum + warp() * 32 + lane();
    if (unit.is_last) {
      finish_dq(dq, unit);
    } else if (unit.is_first) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        global_add(sum + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    __syncwarp();
    release(&shared.dq_added[warpgroup]);
  }

  __device__ __forceinline__ void start_scores_of(float (&s)[kRows / 2], unsigned n) const {
    start_scores<T, kDqk, kRows, kKeys, kRows>(s, keys(), shared.q[stage(n)]);
  }

  __device__ __forceinline__ void run() {
    float dk[kWantsDk ? kDqk / 2 : 1], dv[kWantsDv ? kDv / 2 : 1];
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    const int tiles = uniform(work.tiles());
    const unsigned count = static_cast<unsigned>(tiles * work.group);
    barrier_wait(&shared.keys_full, 0);
    clear_keys();
    if (count > 0) {
      if constexpr (!kSums) {
        if (!L::kSplitsProducts && work.takes_turns) {
          walk_in_turns(dk, dv, tiles, static_cast<int>(count));
        } else {
          walk(dk, dv, tiles, count);
        }
      } else if constexpr (L::kUnitsAreRows) {
        walk_behind(dk, dv, tiles, count);
      } else {
        walk_ahead(dk, dv, tiles, count);
      }
    }
    store(dk, dv);
  }

  /// Keys of other sequences and of the room behind the valid ones may hold anything.
  __device__ __forceinline__ void clear_keys() const {
    const int keys = uniform(work.range.kv_tokens - work.first_key);
    if (keys >= kKeys) return;
    const LiveRows live = {0, 0, keys};
    const int thread = static_cast<int>(threadIdx.x) - 128;
    clear_dead_rows<kKeys, kDqk>(shared.k, live, 0, thread, L::kConsumers);
    clear_dead_rows<kKeys, kDv>(shared.v, live, 0, thread, L::kConsumers);
    fence_proxy_async();
    named_barrier_sync(1, L::kConsumers);
  }

  /// With shares of dq of a head of 128: the scores of the next tile are computed and weighed beside dQ of this one.
  __device__ __forceinline__ void walk_ahead(float (&dk)[kDqk / 2], float (&dv)[kDv / 2], int tiles,
                                             unsigned count) {
    float s[kRows / 2];
    std::uint32_t weights[kSteps][4];
    int left = tiles;  // of this query head
    int position = work.p_first + (work.last_tile - 1) * kRows;
    barrier_wait(&shared.q_full[0], 0);
    start_scores_of(s, 0);
    wgmma_wait<0>();
    wgmma_touch(s);
    weigh(s, weights, shared.lse2[0], position);
#pragma unroll 1
    for (unsigned n = 0; n < count; ++n) {
      const unsigned at = stage(n);
      const unsigned next = n + 1 == count ? n : n + 1;  // (The scores of the last tile are computed twice.)
      position -= kRows;
      if (--left == 0) {
        left = work.tiles();
        position = work.p_first + (work.last_tile - 1) * kRows;
      }
      float dp[kRows / 2];
      std::uint32_t ds[kSteps][4];
      barrier_wait(&shared.dout_full[at], parity(n));
      start_scores<T, kDv, kRows, kKeys, kRows>(dp, values(), shared.dout[at]);
      start_values<T, kDv, kRows, kRows>(dv, weights, shared.dout[at]);
      wgmma_wait<1>();
      wgmma_touch(dp);
      differentiate(s, dp, ds, shared.lse2[at], shared.big_d[at]);
      store_ds(ds, n);
      start_values<T, kDqk, kRows, kRows>(dk, ds, shared.q[at]);
      barrier_wait(&shared.q_full[stage(next)], parity(next));
      start_scores_of(s, next);
      wgmma_wait<0>();
      wgmma_touch(s);
      wgmma_touch(dk);
      start_dq(dp, n);  // in the registers of dP^T, which is done with
      wgmma_touch(dv);
      release(&shared.dout_empty[at]);
      release(&shared.q_empty[at]);
      weigh(s, weights, shared.lse2[stage(next)], position);
      wgmma_wait<0>();
      wgmma_touch(dp);
      hand_over_dq(dp, n);
    }
  }

  /// With shares of dq of a head of 64, whose tiles have twice as many rows: dQ of a tile is computed beside dK of the next one, when
  /// dS of all keys is there for certain.
  __device__ __forceinline__ void walk_behind(float (&dk)[kDqk / 2], float (&dv)[kDv / 2], int tiles,
                                              unsigned count) {
    float s[kRows / 2];
    int left = tiles;  // of this query head
    int position = work.p_first + (work.last_tile - 1) * kRows;
    barrier_wait(&shared.q_full[0], 0);
    start_scores_of(s, 0);
#pragma unroll 1
    for (unsigned n = 0; n < count; ++n) {
      const unsigned at = stage(n);
      const unsigned next = n + 1 == count ? n : n + 1;
      float dp[kRows / 2];
      std::uint32_t weights[kSteps][4], ds[kSteps][4];
      barrier_wait(&shared.dout_full[at], parity(n));
      start_scores<T, kDv, kRows, kKeys, kRows>(dp, values(), shared.dout[at]);
      wgmma_wait<1>();
      wgmma_touch(s);
      weigh(s, weights, shared.lse2[at], position);
      wgmma_wait<0>();
      wgmma_touch(dp);
      differentiate(s, dp, ds, shared.lse2[at], shared.big_d[at]);
      store_ds(ds, n);
      start_values<T, kDv, kRows, kRows>(dv, weights, shared.dout[at]);
      start_values<T, kDqk, kRows, kRows>(dk, ds, shared.q[at]);
      float dq[32];
      start_dq(dq, n - 1);  // (Before the first: of nothing, for nobody.)
      wgmma_wait<1>();
      wgmma_touch(dk);
      wgmma_touch(dv);
      release(&shared.dout_empty[at]);
      release(&shared.q_empty[at]);
      barrier_wait(&shared.q_full[stage(next)], parity(next));
      start_scores_of(s, next);
      wgmma_wait<1>();
      wgmma_touch(dq);
      if (n > 0) hand_over_dq(dq, n - 1);
      wgmma_wait<0>();
      wgmma_touch(s);
      position -= kRows;
      if (--left == 0) {
        left = tiles;
        position = work.p_first + (work.last_tile - 1) * kRows;
      }
    }
    float dq[32];
    start_dq(dq, count - 1);
    wgmma_wait<0>();
    wgmma_touch(dq);
    hand_over_dq(dq, count - 1);
  }

  /// Passes over tiles that these keys are not seen from.
  __device__ __forceinline__ void skip(unsigned n, int tiles) const {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, ++n) {
      barrier_wait(&shared.q_full[stage(n)], parity(n));
      release(&shared.q_empty[stage(n)]);
      barrier_wait(&shared.dout_full[stage(n)], parity(n));
      release(&shared.dout_empty[stage(n)]);
    }
  }

  /// The products of tile n, whose scores are in s, and beside them the scores of the tile that `next` names: the warpgroup's next
  /// one, or, for nobody, this one again.
  template <typename Next>
  __device__ __forceinline__ void multiply(float (&dk)[kWantsDk ? kDqk / 2 : 1],
                                           float (&dv)[kWantsDv ? kDv / 2 : 1], float (&s)[kRows / 2],
                                           unsigned n, int position, const Next& next) {
    const unsigned at = stage(n);
    std::uint32_t weights[kSteps][4], ds[kSteps][4];
    barrier_wait(&shared.dout_full[at], parity(n));
    float dp[kWantsDk ? kRows / 2 : 1];
    if constexpr (kWantsDk) {
      start_scores<T, kDv, kRows, kKeys, kRows>(dp, values(), shared.dout[at]);
      weigh(s, weights, shared.lse2[at], position);
      if constexpr (kWantsDv) {
        start_values<T, kDv, kRows, kRows>(dv, weights, shared.dout[at]);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      wgmma_touch(dp);
      differentiate(s, dp, ds, shared.lse2[at], shared.big_d[at]);
    } else {
      weigh(s, weights, shared.lse2[at], position);
      start_values<T, kDv, kRows, kRows>(dv, weights, shared.dout[at]);
    }
    const unsigned following = next();
    if constexpr (kWantsDk) start_values<T, kDqk, kRows, kRows>(dk, ds, shared.q[at]);
    barrier_wait(&shared.q_full[stage(following)], parity(following));
    start_scores_of(s, following);
    wgmma_wait<1>();
    release(&shared.dout_empty[at]);
    wgmma_wait<0>();
    wgmma_touch(s);
    if constexpr (kWantsDk) wgmma_touch(dk);
    if constexpr (kWantsDv) wgmma_touch(dv);
    release(&shared.q_empty[at]);
  }

  /// The scores of tile n, with nothing beside them.
  __device__ __forceinline__ void begin(float (&s)[kRows / 2], unsigned n) const {
    barrier_wait(&shared.q_full[stage(n)], parity(n));
    start_scores_of(s, n);
    wgmma_wait<0>();
    wgmma_touch(s);
  }

  /// Without shares of dq. Each warpgroup takes its own part of the tiles.
  __device__ __forceinline__ void walk(float (&dk)[kWantsDk ? kDqk / 2 : 1],
                                       float (&dv)[kWantsDv ? kDv / 2 : 1], int tiles, unsigned count) {
    Tiles own = tiles_that_see<kRows>(arguments, first_key(), 64, work.range);
    own = {max(own.first, work.first_tile), min(own.last, work.last_tile)};
    const int own_tiles = uniform(max(own.last - own.first, 0));
    if (own_tiles == 0) {
      skip(0, static_cast<int>(count));
      return;
    }
    const int before = uniform(work.last_tile - own.last), between = tiles - own_tiles;
    const int p_last = work.p_first + (own.last - 1) * kRows;
    int heads = work.group;
    int left = own_tiles;  // of this query head
    int position = p_last;
    skip(0, before);
    unsigned n = static_cast<unsigned>(before);
    float s[kRows / 2];
    begin(s, n);
    bool head_ends = false, jumps = false, last = false;
#pragma unroll 1
    for (;;) {
      unsigned next = n;
      multiply(dk, dv, s, n, position, [&] {
        head_ends = --left == 0;
        last = head_ends && --heads == 0;
        // The scores of the next tile beside the products of this one, where it is the next in shared memory, too.
        jumps = head_ends && between > 0;
        next = last || jumps ? n : n + 1;
        return next;
      });
      if (last) break;
      n = next;
      left = head_ends ? own_tiles : left;
      position = head_ends ? p_last : position - kRows;
      if (jumps) {
        skip(n + 1, between);
        n += static_cast<unsigned>(between) + 1;
        begin(s, n);
      }
    }
    skip(n + 1, between - before);
  }

  /// Without shares of dq, when both warpgroups have the same keys: every second tile.
  __device__ __forceinline__ void walk_in_turns(float (&dk)[kWantsDk ? kDqk / 2 : 1],
                                                float (&dv)[kWantsDv ? kDv / 2 : 1], int tiles, int count) {
    const int first = uniform(warpgroup);
    skip(0, min(first, count));
    if (first >= count) return;
    const int p_last = work.p_first + (work.last_tile - 1) * kRows;
    float s[kRows / 2];
    begin(s, static_cast<unsigned>(first));
    int tile = first % tiles;
#pragma unroll 1
    for (int n = first; n < count; n += 2) {
      multiply(dk, dv, s, static_cast<unsigned>(n), p_last - tile * kRows, [&] {
        const bool last = n + 2 >= count;
        skip(static_cast<unsigned>(n + 1), last ? count - 1 - n : 1);
        return static_cast<unsigned>(last ? n : n + 2);
      });
      tile += 2;
      while (tile >= tiles) tile -= tiles;
    }
  }

  __device__ __forceinline__ void store(const float (&dk)[kWantsDk ? kDqk / 2 : 1],
                                        const float (&dv)[kWantsDv ? kDv / 2 : 1]) const {
    if (work.share <= 0) {
      if constexpr (kWantsDk)
        store_rows(dk, arguments.scale, rows_of(arguments.dk, arguments.d_qk), 0, lane());
      if constexpr (kWantsDv) store_rows(dv, 1.0f, rows_of(arguments.dv, arguments.d_v), 0, lane());
    }
    if constexpr (!kSums) {
      if (work.share < 0) return;
      float4* share =
          shares_of(arguments, work.sequence, work.kv_head, work.block, work.share, kKeys, kDqk + kDv) +
          (L::kSplitsProducts ? 0 : 64 * warpgroup) * (kDqk + kDv) / 4 + warp() * 32 + lane();
      if constexpr (kWantsDk) save(dk, share);
      if constexpr (kWantsDv) save(dv, share + 64 * kDqk / 4);
    }
  }

  template <int kCount>
  __device__ __forceinline__ static void save(const float (&x)[kCount], float4* share) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      share[i * 128] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

  __device__ __forceinline__ RowPair<T> rows_of(const Rows& rows, int columns) const {
    const int key = first_key() + warp() * 16 + lane() / 4;
    T* first = static_cast<T*>(rows.data) + row_index(rows, arguments.kv_begin != nullptr, work.sequence,
                                                      work.range.kv_row, work.kv_head, key);
    return {first, rows.token, key < work.range.kv_tokens, key + 8 < work.range.kv_tokens, columns};
  }
};

template <typename T, int kDqk, int kDv, bool kCap, bool kSums>
__global__ void __launch_bounds__((KeysLayout<T, kDqk, kDv, kCap, kSums>::kThreads), 1)
    backward_keys_kernel(const __grid_constant__ BackwardArguments arguments,
                         const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map,
                         const __grid_constant__ CUtensorMap dout_map) {
  using L = KeysLayout<T, kDqk, kDv, kCap, kSums>;
  using Feed = KeysFeed<L>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = static_cast<int>(threadIdx.x) % 32;
  grid_wait();  // for what is known of the rows
  grid_launch_dependents();
  if (threadIdx.x == 0) {
    const int ticket = static_cast<int>(counter_next(arguments.ticket));
    shared.has_work = find_block<L::kKeys, L::kRows>(arguments, ticket, shared.work);
    barrier_init(&shared.keys_full, 1);
    for (int stage = 0; stage < L::kStages; ++stage) {
      barrier_init(&shared.q_full[stage], 1);
      barrier_init(&shared.q_empty[stage], L::kConsumers / 32);
      barrier_init(&shared.dout_full[stage], 1);
      barrier_init(&shared.dout_empty[stage], L::kConsumers / 32);
      barrier_init(&shared.loaded[stage], 1);
    }
    for (int buffer = 0; buffer < L::kDsBuffers; ++buffer) {
      barrier_init(&shared.ds_full[buffer], L::kConsumers / 32);
      barrier_init(&shared.ds_empty[buffer], L::kConsumers / 32);
    }
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      barrier_init(&shared.turn_come[warpgroup], 1);
      barrier_init(&shared.dq_added[warpgroup], 4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (!shared.has_work) return;
  const KeyBlock& work = shared.work;
  if (warp < 4) {
    registers_shrink<L::kFeederRegisters>();
    if (warp == 0 && lane == 0) Feed::load(arguments, q_map, k_map, v_map, dout_map, shared, work);
    if (warp == 1) Feed::clear(arguments, shared, work, lane);
    if constexpr (kSums) {
      if (warp >= 2 && lane == 0) Feed::lead_dq(arguments, shared, work, warp - 2);
    }
  } else {
    registers_grow<L::kConsumerRegisters>();
    const int warpgroup = warp / 4 - 1;
    if constexpr (L::kSplitsProducts) {
      if (warpgroup == 0) {
        KeysConsumer<L, false, true>(arguments, shared, warpgroup).run();
      } else {
        KeysConsumer<L, true, false>(arguments, shared, warpgroup).run();
      }
    } else {
      KeysConsumer<L, true, true>(arguments, shared, warpgroup).run();
    }
  }
}

template <typename T, int kDqk, int kDv, bool kCap, bool kSums>
Instance backward_keys_instance() {
  using L = KeysLayout<T, kDqk, kDv, kCap, kSums>;
  return {reinterpret_cast<const void*>(&backward_keys_kernel<T, kDqk, kDv, kCap, kSums>), L::kThreads,
          static_cast<int>(sizeof(typename L::Shared)), L::kRows};
}

}  // namespace basin::attention::sm90
