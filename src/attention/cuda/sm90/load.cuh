// How the copy engine brings tiles into shared memory. A tile of R rows and D columns lies as D / 64 blocks of R rows of 128
// swizzled bytes.
#pragma once

#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

inline constexpr int kBlockColumns = 64;  // 128 bytes, the width of a swizzled row

/// A place in a ring of kSlots buffers, and the parity of the phase that its barriers are in.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  int parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

/// Boxes of keys that make up the tile at position `key`: pages, or parts of pages.
template <int kTile>
__device__ __forceinline__ int boxes_in_tile(const Arguments& arguments, int kv_tokens, int key) {
  return (min(kv_tokens - key, kTile) + (1 << arguments.box_shift) - 1) >> arguments.box_shift;
}

/// The page of box `box` of the tile at `key`; -1 when there is none.
template <int kTile>
__device__ __forceinline__ int page_of(const Arguments& arguments, int sequence, int kv_tokens, int key,
                                       int box) {
  if (arguments.page_table == nullptr || box >= boxes_in_tile<kTile>(arguments, kv_tokens, key)) return -1;
  const std::int32_t* pages = arguments.page_table + sequence * arguments.page_table_stride;
  return __ldg(pages + ((key + (box << arguments.box_shift)) >> arguments.page_shift));
}

/// Loads the kTile keys from position `key` on. All lanes of a warp call it; a lane issues every 32nd box, and `page` is
/// page_of its first one, which the caller fetches early because its latency is that of a trip to memory. Rows of missing
/// pages and rows past the last box keep what shared memory held.
template <int kTile, int kColumns>
__device__ __forceinline__ void load_keys(const Arguments& arguments, const CUtensorMap& map,
                                          void* destination, Barrier* barrier, int sequence,
                                          const SequenceRange& range, int head, int key, int page,
                                          std::uint64_t policy, int lane) {
  constexpr int kRowBytes = kColumns * 2;
  constexpr int kBlockBytes = kTile * 128;
  auto* bytes = static_cast<unsigned char*>(destination);
  if (arguments.page_table == nullptr) {
    if (lane == 0) {
      barrier_arrive_expect(barrier, kTile * kRowBytes);
#pragma unroll
      for (int block = 0; block < kColumns / kBlockColumns; ++block) {
        tma_load(bytes + block * kBlockBytes, &map, barrier, block * kBlockColumns, head, range.kv_row + key,
                 arguments.kv_begin == nullptr ? sequence : 0, policy);
      }
    }
    return;
  }
  const int boxes = boxes_in_tile<kTile>(arguments, range.kv_tokens, key);
  const int in_page = (1 << arguments.page_shift) - 1;
  int present = __popc(__ballot_sync(0xffffffffu, page >= 0));
  if (boxes > 32) {
    int more = 0;
#pragma unroll 1
    for (int box = lane + 32; box < boxes; box += 32) {
      more += page_of<kTile>(arguments, sequence, range.kv_tokens, key, box) >= 0;
    }
    present += __reduce_add_sync(0xffffffffu, more);
  }
  if (lane == 0) barrier_arrive_expect(barrier, (present << arguments.box_shift) * kRowBytes);
  __syncwarp();
#pragma unroll 1
  for (int box = lane; box < boxes; box += 32) {
    if (box >= 32) page = page_of<kTile>(arguments, sequence, range.kv_tokens, key, box);
    if (page < 0) continue;
    const int row = box << arguments.box_shift;
#pragma unroll
    for (int block = 0; block < kColumns / kBlockColumns; ++block) {
      tma_load(bytes + block * kBlockBytes + row * 128, &map, barrier, block * kBlockColumns, head,
               (key + row) & in_page, page, policy);
    }
  }
}

/// Zeroes the rows of a loaded tile that `live` rejects; `threads` threads share the work. The caller fences.
template <int kTile, int kColumns>
__device__ __forceinline__ void clear_dead_rows(void* tile, const LiveRows& live, int key, int thread,
                                                int threads) {
  constexpr int kChunksPerRow = 8;  // of 16 bytes
  auto* chunks = static_cast<uint4*>(tile);
  for (int i = thread; i < kTile * kColumns / kBlockColumns * kChunksPerRow; i += threads) {
    const int row = i / kChunksPerRow % kTile;
    if (!live.live(key + row)) chunks[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace basin::attention::sm90
