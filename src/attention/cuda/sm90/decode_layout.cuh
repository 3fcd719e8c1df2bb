// What the warps of a decode CTA share: shape, work and shared memory.
#pragma once

#include "attention/cuda/sm90/choose.h"
#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

/// kAlone: there are no more CTAs than multiprocessors, so that one may have a whole one.
template <typename T, int kDqk, int kDv, int kBlockRows, bool kCap, bool kAlone>
struct DecodeLayout {
  using Element = T;
  static constexpr int kQkColumns = kDqk, kVColumns = kDv, kRows = kBlockRows;
  static constexpr int kTile = tile_keys(kDqk);
  static constexpr int kHalves = kTile / 64;  // blocks of 64 keys
  static_assert(kHalves == 1 || kHalves == 2, "the order of sums is that of order.cuh");
  static constexpr int kSegmentTiles = segment_tiles(kDqk);
  static constexpr int kConsumers = 128;
  static constexpr int kThreads = kConsumers + 32;
  // Two CTAs on an SM hide each other's waits; more rows need the registers of both.
  static constexpr int kCtasPerSm = decode_ctas_per_multiprocessor(kRows, kDqk, kAlone);
  static constexpr int kWide = kDqk > kDv ? kDqk : kDv;
  static constexpr int kSlots = 96 * 1024 / (kTile * kWide * 2) * (kCtasPerSm == 2 ? 1 : 2) -
                                (kRows == 64 ? 2 : 0) - (kDv > 128 && kRows > 8 ? 1 : 0);
  static_assert(kDqk == kDv || kSlots % 2 == 0, "keys and values of different sizes need slots of their own");
  static constexpr int kColumns = kRows / 4;  // query rows whose scores one thread holds
  static constexpr int kBlocks = kDv / 64;    // blocks of 64 output columns
  static constexpr bool kFolds = decode_folds(kRows, kDv);
  static constexpr int kSums = kRows >= 16 ? kRows / 16 : 1;  // running sums of l that one thread owns

  // A saved state: kRows x kDv accumulators, then kRows x (m, l).
  static constexpr int kStateFloats = kRows * (kDv + 2);
  static_assert(kStateFloats % 4 == 0, "states are read sixteen bytes at a time");
  /// The number of the first state of a (sequence, key head); its segments follow each other.
  __device__ __forceinline__ static std::int64_t first_state(const Arguments& arguments, int sequence,
                                                             int kv_head) {
    return (std::int64_t{sequence} * arguments.h_kv + kv_head) * arguments.max_segments;
  }

  /// One unit of work: a segment of the keys of one (sequence, key head).
  struct Work {
    int sequence;  // -1: no work left
    int kv_head;
    int first;  // tiles [first, end) of `walk`
    int end;
    SequenceRange range;
    TileWalk walk;
    LiveRows live;
    int ordinal;      // of the segment among the row's segments
    bool first_here;  // the first segment of the row in this CTA: the query is loaded for it
    bool last_here;
    bool whole;  // this CTA has all segments of the row, and folds them as it goes
  };

  struct RowSum {
    float m, l;
  };

  struct Shared {
    alignas(1024) T ring[kSlots * kTile * (kDqk + kDv) / 2];  // slots of keys and values in turn
    alignas(
        1024) T q[2][kRows * kDqk];  // of this row and the next, so that loading never waits for a row to end
    alignas(1024) T q_sink[2][(kRows <= 16 ? kRows : 8) * kDqk];
    alignas(128) T p[kRows / 8][kTile][8];
    alignas(16) float maxima[kRows][4];    // by warp
    alignas(16) float parts[4][8][kRows];  // quarter sums by warp, key mod 8, row
    float rescale[kRows];
    RowSum rows[kRows];  // of the finished segment
    Barrier full[kSlots], empty[kSlots];
    Barrier q_full[2], q_empty[2];
    Barrier work_full[2], work_empty[2];
    Work work[2];

    __device__ __forceinline__ T* slot(int i) {
      if constexpr (kDqk == kDv) return ring + i * kTile * kDqk;
      return ring + i / 2 * kTile * (kDqk + kDv) + i % 2 * kTile * kDqk;
    }
  };
  static_assert(sizeof(Shared) <= (kCtasPerSm == 2 ? 113 : 227) * 1024, "shared memory of one SM");
};

}  // namespace basin::attention::sm90
