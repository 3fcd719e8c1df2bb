// The end of decode: rows whose segments several CTAs computed. The grid starts under the tail of decode_kernel, and every warp or CTA
// finds its row while it waits.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/choose.h"
#include "attention/cuda/sm90/decode_line.cuh"
#include "attention/cuda/sm90/fold.cuh"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/grid.cuh"
#include "attention/cuda/sm90/sequence.cuh"

namespace basin::attention::sm90 {

/// A sequence whose segments were saved.
template <typename L>
struct SavedSequence {
  int sequence;  // -1: there are not so many
  int segments;

  /// Number `ordinal` of them. All lanes of a warp call it together.
  __device__ __forceinline__ static SavedSequence find(const Arguments& arguments, int ordinal, int lane) {
    using Tiles = DecodeTiles<L>;
    if constexpr (!L::kFolds) {  // every sequence is saved
      const Tiles tiles = Tiles::of(arguments, ordinal);
      if (tiles.count == 0) return {-1, 0};
      return {ordinal, tiles.segments()};
    }
    DecodeLine line{arguments.gangs, 0};
    for (int base = 0; base < arguments.batch; base += 32)
      line.total += __reduce_add_sync(0xffffffffu, Tiles::of(arguments, base + lane).count);
    std::int64_t row = 0;  // where the tiles of the sequences under the lanes start
    for (int base = 0; base < arguments.batch; base += 32) {
      const Tiles tiles = Tiles::of(arguments, base + lane);
      const int sum = sum_to_lane(tiles.count, lane);
      const bool saved = tiles.count > 0 && !line.is_whole(tiles, row + sum - tiles.count);
      const std::uint32_t all = __ballot_sync(0xffffffffu, saved);
      if (ordinal < __popc(all)) {
        const bool found = saved && __popc(all & ((1u << lane) - 1)) == ordinal;
        const int owner = __ffs(__ballot_sync(0xffffffffu, found)) - 1;
        return {base + owner, tiles.of_lane(owner).segments()};
      }
      ordinal -= __popc(all);
      row += __shfl_sync(0xffffffffu, sum, 31);
    }
    return {-1, 0};
  }
};

/// Folds row i of the saved sequences, which need not exist: each has h_q max_q_tokens, token by token. kThreads threads call it
/// together.
template <typename L, int kThreads>
__device__ __forceinline__ void fold_decoded_row(const Arguments& arguments, int i, void* memory,
                                                 int thread) {
  using T = typename L::Element;
  constexpr int kDv = L::kVColumns;
  const int rows = arguments.h_q * arguments.max_q_tokens;
  const int group = arguments.h_q / arguments.h_kv;
  const int token = i % rows / arguments.h_q, head = i % rows % arguments.h_q;
  const auto saved = SavedSequence<L>::find(arguments, i / rows, thread % 32);
  if (saved.sequence < 0 || token >= query_tokens(arguments, saved.sequence)) {
    grid_wait();
    return;
  }
  const int q_row = arguments.q_begin == nullptr ? 0 : __ldg(arguments.q_begin + saved.sequence);
  const float sink = sink_of(arguments, head);
  const float* states =
      arguments.states + L::first_state(arguments, saved.sequence, head / group) * L::kStateFloats;
  T* out = static_cast<T*>(arguments.out) + out_index(arguments, saved.sequence, q_row, head, token);
  grid_wait();
  fold_row<kDv, kThreads>(states, L::kStateFloats, L::kRows, token * group + head % group, saved.segments,
                          memory, arguments.fold_segments, thread, [&](float m, float l, const auto& o) {
                            const Finish end = finish(m, l, sink);
                            if (thread == 0) write_lse(arguments, saved.sequence, q_row, head, token, end);
#pragma unroll
                            for (int c = 0; c < (kDv + kThreads - 1) / kThreads; ++c) {
                              const int column = c * kThreads + thread;
                              if (column < arguments.d_v) out[column] = T(output(o[c], end.factor));
                            }
                          });
}

/// `L` is a DecodeLayout. Shared memory: fold_bytes of every row of a CTA.
template <typename L>
__global__ void __launch_bounds__(kFoldThreads)
    decode_fold_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(16) unsigned char fold_memory[];
  const int thread = static_cast<int>(threadIdx.x), cta = static_cast<int>(blockIdx.x);
  if (arguments.fold_threads == 32) {
    constexpr int kWarps = kFoldThreads / 32;
    const int warp = thread / 32;
    const int bytes = fold_bytes(L::kVColumns, arguments.fold_segments);
    fold_decoded_row<L, 32>(arguments, cta * kWarps + warp, fold_memory + warp * bytes, thread % 32);
  } else {
    fold_decoded_row<L, kFoldThreads>(arguments, cta, fold_memory, thread);
  }
}

}  // namespace basin::attention::sm90
