// Attention of a few query rows over many keys. The segments of all sequences are dealt out evenly over gangs of CTAs (one CTA per
// key head); rows that several gangs share are folded by a second kernel (decode_fold.cuh).
//
// Keys lie in M and the query rows of a group in N, so that eight rows waste nothing: S^T = K Q^T and O^T += V^T P^T, with V and
// P as MN-major operands. One warpgroup computes, one warp finds work and drives the copy engine through a ring of tiles that
// alternates keys and values.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/decode_feed.cuh"
#include "attention/cuda/sm90/decode_fold.cuh"
#include "attention/cuda/sm90/decode_layout.cuh"
#include "attention/cuda/sm90/instances.h"
#include "attention/cuda/sm90/load.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/ptx/grid.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/rows.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// The warpgroup of decode that computes.
template <typename T, int kDqk, int kDv, int kRows, bool kCap, bool kAlone>
struct Decode {
  using L = DecodeLayout<T, kDqk, kDv, kRows, kCap, kAlone>;
  using Work = typename L::Work;
  using RowSum = typename L::RowSum;
  using Shared = typename L::Shared;
  static constexpr int kTile = L::kTile;
  static constexpr int kHalves = L::kHalves;
  static constexpr int kConsumers = L::kConsumers;
  static constexpr int kSlots = L::kSlots;
  static constexpr int kColumns = L::kColumns;
  static constexpr int kBlocks = L::kBlocks;
  static constexpr int kSums = L::kSums;
  static constexpr bool kFolds = L::kFolds;

  /// The rows of a thread's scores and outputs: column i of kColumns is query row 8 (i / 2) + 2 c + i % 2.
  __device__ __forceinline__ static int row_of(int i, int c) { return i / 2 * 8 + 2 * c + i % 2; }

  __device__ __forceinline__ static void scores(float (&s)[kHalves][kRows / 2], const T* k, const T* q) {
    const std::uint64_t b = swizzled_operand(q, 0);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::uint64_t a = swizzled_operand(k + half * 64 * kBlockColumns, 0);
#pragma unroll
      for (int step = 0; step < kDqk / kStepKeys; ++step) {
        const int block = step / 4, inside = step % 4 * 32;
        Wgmma<kRows>::template shared<T, Major::k, Major::k>(
            s[half], advance(a, block * kTile * 128 + inside), advance(b, block * kRows * 128 + inside),
            step != 0);
      }
    }
  }

  __device__ __forceinline__ static void values(float (&o)[kBlocks][kRows / 2], const T* v, const T* p,
                                                bool keep) {
    const std::uint64_t a = swizzled_operand(v, 0);
    const std::uint64_t b = plain_operand(p, 8 * 16, kTile * 16);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int step = 0; step < kTile / kStepKeys; ++step) {
        Wgmma<kRows>::template shared<T, Major::mn, Major::mn>(
            o[block], advance(a, block * kTile * 128 + step * kStepKeys * 128),
            advance(b, step * kStepKeys * 16), keep || step != 0);
      }
    }
  }

  /// The sum of a quarter of the tile's keys, as far as this thread has them: elements e and e + 2 of each half.
  __device__ __forceinline__ static float quarter(const float (&p)[kHalves][kRows / 2], int e) {
    if constexpr (kHalves == 2) return quarter_sum(p[0][e], p[0][e + 2], p[1][e], p[1][e + 2]);
    return __fadd_rn(p[0][e], p[0][e + 2]);
  }

  /// Keys of the tile that the second query scores: those below sink_tokens, when there is one.
  __device__ __forceinline__ static int keys_of_sink(const Arguments& arguments, const Work& work, int at) {
    return kRows <= 16 && arguments.has_q_sink ? arguments.sink_tokens - work.walk.tile(at) * kTile : 0;
  }

  /// Starts the scores of tile `at`, whose keys lie at `keys` of the ring.
  __device__ __forceinline__ static void start_scores(const Arguments& arguments, Shared& shared,
                                                      const Work& work, int at, RingPlace<kSlots> keys,
                                                      int buffer, float (&s)[kHalves][kRows / 2]) {
    barrier_wait(&shared.full[keys.slot], keys.parity);
    wgmma_fence();
    scores(s, shared.slot(keys.slot),
           keys_of_sink(arguments, work, at) > 0 ? shared.q_sink[buffer] : shared.q[buffer]);
    wgmma_commit();
  }

  /// Waits for them and releases the keys. The one tile that both queries score is scored again here.
  __device__ __forceinline__ static void finish_scores(const Arguments& arguments, Shared& shared,
                                                       const Work& work, int at, RingPlace<kSlots> keys,
                                                       int buffer, float (&s)[kHalves][kRows / 2], int warp,
                                                       int lane) {
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) wgmma_touch(s[half]);
    if constexpr (kRows <= 16) {
      const int from_sink = keys_of_sink(arguments, work, at);
      if (from_sink > 0 && from_sink < kTile) {
        float other[kHalves][kRows / 2];
        wgmma_fence();
        scores(other, shared.slot(keys.slot), shared.q[buffer]);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          wgmma_touch(other[half]);
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) {
            if (64 * half + 16 * warp + lane / 4 + i / 2 % 2 * 8 >= from_sink) s[half][i] = other[half][i];
          }
        }
      }
    }
    if (lane == 0) barrier_arrive(&shared.empty[keys.slot]);
  }

  /// Adds a finished segment to the running total of a thread's rows.
  __device__ __forceinline__ static void fold(RowSum (&total_rows)[kColumns],
                                              float (&total)[kBlocks][kRows / 2],
                                              const RowSum (&done)[kColumns],
                                              const float (&o)[kBlocks][kRows / 2], bool first) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const Fold fold = fold_of(total_rows[i].m, done[i].m);
      total_rows[i] = first ? done[i] : RowSum{fold.m, folded(fold, total_rows[i].l, done[i].l)};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int e = i / 2 * 4 + 2 * h + i % 2;
          total[block][e] = first ? o[block][e] : folded(fold, total[block][e], o[block][e]);
        }
      }
    }
  }

  __device__ static void consume(const Arguments& arguments, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warp = uniform(thread / 32);
    const int g = lane / 4, c = lane % 4;
    const int group = arguments.h_q / arguments.h_kv;
    const auto sync = [] { named_barrier_sync(1, kConsumers); };
    RingPlace<kSlots> next;  // the keys of the tile whose scores come next
    int queries = 0;
    float o[kBlocks][kRows / 2];
    float total[kBlocks][kRows / 2];
    RowSum total_rows[kColumns];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) o[block][i] = total[block][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total_rows[i] = {negative_infinity(), 0.0f};

    for (int turn = 0;; ++turn) {
      const int slot = turn % 2;
      barrier_wait(&shared.work_full[slot], turn / 2 % 2);
      const Work& work = shared.work[slot];
      if (work.sequence < 0) return;
      const int kv_tokens = work.range.kv_tokens;
      const int p_first = kv_tokens - work.range.q_tokens;
      const TileWalk unmasked = unmasked_tiles<kTile>(arguments, p_first, kv_tokens - 1, kv_tokens);
      if (work.first_here) {
        barrier_wait(&shared.q_full[queries % 2], queries / 2 % 2);
        ++queries;
      }

      const int buffer = (queries - 1) % 2;
      float m[kColumns];
      float l[kSums];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) m[i] = negative_infinity();
#pragma unroll
      for (int i = 0; i < kSums; ++i) l[i] = 0.0f;

      const int first = uniform(work.first), end = uniform(work.end);
      float s[kHalves][kRows / 2];
      if (first < end) {
        start_scores(arguments, shared, work, first, next, buffer, s);
        finish_scores(arguments, shared, work, first, next, buffer, s, warp, lane);
        next.advance();
      }
      for (int at = first; at < end; ++at) {
        const int tile = uniform(work.walk.tile(at));
        const int key = tile * kTile;
        const RingPlace<kSlots> place = next;  // of the values
        next.advance();
        if constexpr (kCap) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int i = 0; i < kRows / 2; ++i) s[half][i] = soft_cap(s[half][i], arguments.cap_factor);
          }
        }
        if (!unmasked.has(tile)) [[unlikely]] {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            const RowKeys keys = row_keys(arguments, p_first + row_of(i, c) / group, kv_tokens);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                if (!keys.sees(key + 64 * half + 16 * warp + g + 8 * h))
                  s[half][i / 2 * 4 + 2 * h + i % 2] = negative_infinity();
              }
            }
          }
        }

        float most[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const int e = i / 2 * 4 + i % 2;
          most[i] = fmaxf(s[0][e], s[0][e + 2]);
          if constexpr (kHalves == 2) most[i] = fmaxf(most[i], fmaxf(s[1][e], s[1][e + 2]));
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i)
            most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], step));
        }
        if (g == 0) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) shared.maxima[row_of(i, c)][warp] = most[i];
        }
        sync();

        float rescale[kColumns];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const float4 all = *reinterpret_cast<const float4*>(shared.maxima[row_of(i, c)]);
          const float maximum = fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
          const float m_next = next_maximum(m[i], __fmul_rn(maximum, arguments.score_factor));
          const float shift = shift_of(m_next);
          rescale[i] = exp2_fast(__fadd_rn(m[i], -shift));
          moved |= rescale[i] != 1.0f;
          m[i] = m_next;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& x = s[half][i / 2 * 4 + 2 * h + i % 2];
              x = probability(x, arguments.score_factor, shift);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kColumns; i += 2) {
          const int e = i / 2 * 4;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              auto* words =
                  reinterpret_cast<std::uint32_t*>(shared.p[i / 2][64 * half + 16 * warp + g + 8 * h]);
              words[c] = pack<T>(s[half][e + 2 * h], s[half][e + 2 * h + 1]);
            }
          }
          float2 part;
          part.x = quarter(s, e);
          part.y = quarter(s, e + 1);
          *reinterpret_cast<float2*>(&shared.parts[warp][g][row_of(i, c)]) = part;
        }
        if (warp == 0 && g == 0) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) shared.rescale[row_of(i, c)] = rescale[i];
        }
        // Values that no row may see must be 0, not merely be multiplied by 0.
        barrier_wait(&shared.full[place.slot], place.parity);
        if (!work.live.all(key, kTile))
          clear_dead_rows<kTile, kDv>(shared.slot(place.slot), work.live, key, thread, kConsumers);
        fence_proxy_async();
        sync();

#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const int owned = i * kConsumers + thread;
          const int row = owned / 8, r = owned % 8;
          if (row < kRows) {
            l[i] = add_tile(l[i], shared.rescale[row],
                            tile_sum(shared.parts[0][r][row], shared.parts[1][r][row],
                                     shared.parts[2][r][row], shared.parts[3][r][row]));
          }
        }
        if (at != first && __any_sync(0xffffffffu, moved)) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < kRows / 2; ++i)
              o[block][i] = __fmul_rn(o[block][i], rescale[i / 4 * 2 + i % 2]);
          }
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) wgmma_touch(o[block]);
        wgmma_fence();
        values(o, shared.slot(place.slot), &shared.p[0][0][0], at != first);
        wgmma_commit();
        // The next tile's scores run beside these products.
        if (at + 1 < end) start_scores(arguments, shared, work, at + 1, next, buffer, s);
        wgmma_wait<1>();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) wgmma_touch(o[block]);
        if (at + 1 < end) {
          if (lane == 0) barrier_arrive(&shared.empty[place.slot]);
          finish_scores(arguments, shared, work, at + 1, next, buffer, s, warp, lane);
          next.advance();
        } else {
          wgmma_wait<0>();
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) wgmma_touch(o[block]);
          if (lane == 0) barrier_arrive(&shared.empty[place.slot]);
        }
      }

      // The segment is done: its m and l, for everyone.
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int owned = i * kConsumers + thread;
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
          l[i] = __fadd_rn(l[i], __shfl_xor_sync(0xffffffffu, l[i], step));
        if (owned % 8 == 0 && owned / 8 < kRows) shared.rows[owned / 8].l = l[i];
      }
      if (warp == 0 && g == 0) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) shared.rows[row_of(i, c)].m = m[i];
      }
      if (first == end) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) o[block][i] = 0.0f;
        }
      }
      sync();

      RowSum done[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) done[i] = shared.rows[row_of(i, c)];
      if (!kFolds || !work.whole) {
        save(arguments, work, done, o, warp, g, c);
      } else {
        fold(total_rows, total, done, o, work.first_here);
        if (work.last_here) write_row(arguments, work, total_rows, total, warp, g, c, group);
      }
      if (work.last_here && lane == 0) barrier_arrive(&shared.q_empty[buffer]);
      sync();  // shared.rows may be written again
      if (lane == 0) barrier_arrive(&shared.work_empty[slot]);
    }
  }

  // ------------------------------------------------------------------------------------------------ output

  /// Finishes rows that this CTA holds whole.
  __device__ __forceinline__ static void write_row(const Arguments& arguments, const Work& work,
                                                   const RowSum (&rows)[kColumns],
                                                   const float (&o)[kBlocks][kRows / 2], int warp, int g,
                                                   int c, int group) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int token = row_of(i, c) / group, head = work.kv_head * group + row_of(i, c) % group;
      if (token >= work.range.q_tokens) continue;
      const Finish row = finish(rows[i].m, rows[i].l, sink_of(arguments, head));
      if (warp == 0 && g == 0) write_lse(arguments, work.sequence, work.range.q_row, head, token, row);
      auto* out =
          static_cast<T*>(arguments.out) + out_index(arguments, work.sequence, work.range.q_row, head, token);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = 64 * block + 16 * warp + g + 8 * h;
          if (column < arguments.d_v)
            out[column] = T(output(o[block][i / 2 * 4 + 2 * h + i % 2], row.factor));
        }
      }
    }
  }

  __device__ __forceinline__ static void save(const Arguments& arguments, const Work& work,
                                              const RowSum (&rows)[kColumns],
                                              const float (&o)[kBlocks][kRows / 2], int warp, int g, int c) {
    float* state = arguments.states +
                   (L::first_state(arguments, work.sequence, work.kv_head) + work.ordinal) * L::kStateFloats;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int row = row_of(i, c);
      if (warp == 0 && g == 0) {
        __stcg(reinterpret_cast<float2*>(state + kRows * kDv) + row, make_float2(rows[i].m, rows[i].l));
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          __stcg(state + row * kDv + 64 * block + 16 * warp + g + 8 * h, o[block][i / 2 * 4 + 2 * h + i % 2]);
        }
      }
    }
  }
};

template <typename T, int kDqk, int kDv, int kRows, bool kCap, bool kAlone>
__global__ void __launch_bounds__((DecodeLayout<T, kDqk, kDv, kRows, kCap, kAlone>::kThreads),
                                  (DecodeLayout<T, kDqk, kDv, kRows, kCap, kAlone>::kCtasPerSm))
    decode_kernel(const __grid_constant__ Arguments arguments, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap q_sink_map, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map) {
  using D = DecodeLayout<T, kDqk, kDv, kRows, kCap, kAlone>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename D::Shared*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == D::kConsumers) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    constexpr int kWarps = D::kConsumers / 32;
    for (int slot = 0; slot < D::kSlots; ++slot) {
      barrier_init(&shared.full[slot], 1);
      barrier_init(&shared.empty[slot], kWarps);
    }
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(&shared.q_full[slot], 1);
      barrier_init(&shared.q_empty[slot], kWarps);
      barrier_init(&shared.work_full[slot], 1);
      barrier_init(&shared.work_empty[slot], kWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  grid_launch_dependents();
  if (warp == D::kConsumers / 32) {
    DecodeFeed<D>::feed(arguments, q_map, q_sink_map, k_map, v_map, shared,
                        static_cast<int>(threadIdx.x) % 32);
  } else {
    Decode<T, kDqk, kDv, kRows, kCap, kAlone>::consume(arguments, shared);
  }
}

template <typename T, int kDqk, int kDv, int kRows, bool kCap, bool kAlone>
Instance decode_instance() {
  using D = DecodeLayout<T, kDqk, kDv, kRows, kCap, kAlone>;
  return {
      reinterpret_cast<const void*>(&decode_kernel<T, kDqk, kDv, kRows, kCap, kAlone>), D::kThreads,
      static_cast<int>(sizeof(typename D::Shared)), kRows,
      reinterpret_cast<const void*>(&decode_fold_kernel<DecodeLayout<T, kDqk, kDv, kRows, false, false>>)};
}

}  // namespace basin::attention::sm90
