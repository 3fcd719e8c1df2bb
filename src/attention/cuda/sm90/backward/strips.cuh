// The gradients of sink tokens under a window: the shares of the rows near them and of all strips, added in this order.
#pragma once

#include "attention/cuda/sm90/backward/instances.h"
#include "attention/cuda/sm90/backward/keys_layout.cuh"
#include "attention/cuda/sm90/backward/store_rows.cuh"
#include "attention/cuda/sm90/ptx/grid.cuh"

namespace basin::attention::sm90 {

/// CTA (i, j) has part j of block i: i counts (sequence, key head, block of keys with sink tokens), j its 64 keys and 32 columns, all
/// columns of the first keys before the next.
template <typename T, int kDqk, int kDv>
__global__ void __launch_bounds__(128)
    backward_fold_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kKeys = backward_block_keys(kDqk), kRows = backward_tile_rows(kDqk, false),
                kColumns = kDqk + kDv, kGroups = kColumns / 32;
  const int cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int keys = static_cast<int>(blockIdx.y) / kGroups * 64,
            group = static_cast<int>(blockIdx.y) % kGroups;
  const int block = cta % arguments.sink_blocks, kv_head = cta / arguments.sink_blocks % arguments.h_kv;
  const int sequence = cta / arguments.sink_blocks / arguments.h_kv;
  const SequenceRange range = sequence_range(arguments, sequence);
  const int first_far = first_far_tile<kKeys, kRows>(arguments, block * kKeys, range);
  const int end = min(arguments.sink_tokens, range.kv_tokens);  // of the keys that have strips
  const int key = block * kKeys + keys + thread / 32 * 16 + lane / 4;
  grid_wait();                        // for the shares
  if (key - lane / 4 >= end) return;  // a whole warp
  const auto at = [&](int share) {
    return shares_of(arguments, sequence, kv_head, block, share, kKeys, kColumns) + keys * kColumns / 4 +
           group * 4 * 128 + thread;
  };
  float4 sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = at(0)[i * 128];
  const auto add = [&](const float4* share) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = share[i * 128];
      sum[i] = make_float4(__fadd_rn(sum[i].x, x.x), __fadd_rn(sum[i].y, x.y), __fadd_rn(sum[i].z, x.z),
                           __fadd_rn(sum[i].w, x.w));
    }
  };
  const bool in_turns = strips_take_turns<kKeys>(arguments, block);
#pragma unroll 4
  for (int strip = 0; strip < arguments.strips; ++strip) {
    const Tiles tiles = tiles_of_strip<kRows>(first_far, strip, range.q_tokens);
    if (tiles.first == tiles.last) continue;
    add(at(1 + strip));
    if (in_turns) add(at(1 + strip) + 64 * kColumns / 4);
  }
  const bool is_dk = group < kDqk / 32;
  const Rows& rows = is_dk ? arguments.dk : arguments.dv;
  const float factor = is_dk ? arguments.scale : 1.0f;
  const float x[16] = {sum[0].x, sum[0].y, sum[0].z, sum[0].w, sum[1].x, sum[1].y, sum[1].z, sum[1].w,
                       sum[2].x, sum[2].y, sum[2].z, sum[2].w, sum[3].x, sum[3].y, sum[3].z, sum[3].w};
  T* first = static_cast<T*>(rows.data) +
             row_index(rows, arguments.kv_begin != nullptr, sequence, range.kv_row, kv_head, key);
  const RowPair<T> pair = {first, rows.token, key < end, key + 8 < end,
                           is_dk ? arguments.d_qk : arguments.d_v};
  store_columns(x, factor, pair, (is_dk ? group : group - kDqk / 32) * 32, lane);
}

template <typename T, int kDqk, int kDv>
Instance backward_fold_instance() {
  return {reinterpret_cast<const void*>(&backward_fold_kernel<T, kDqk, kDv>), 128, 0, 0};
}

}  // namespace basin::attention::sm90
