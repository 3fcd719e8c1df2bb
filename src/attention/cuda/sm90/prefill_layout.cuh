// What the warps of a prefill CTA share: shape, work and shared memory.
#pragma once

#include "attention/cuda/sm90/order.cuh"
#include "attention/cuda/sm90/ptx/barrier.cuh"
#include "attention/cuda/sm90/sequence.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {

template <typename T, int kDqk, int kDv, bool kCap>
struct PrefillLayout {
  using Element = T;
  static constexpr int kQkColumns = kDqk, kVColumns = kDv;
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
  // Tiles that need neither mask nor fold have a loop of their own where instructions are short; wider heads are bound by other things.
  static constexpr bool kHasPlainLoop = kDqk <= 64 && !kCap;
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
    Barrier v_full[kStages], v_empty[kStages + 1];  // (the last one is for nobody: see `running_stage`)
    Barrier v_loaded[kStages];  // an edge tile has arrived and waits for its dead rows to be cleared
    Barrier work_full[2], work_empty[2];
    Work work[2];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one SM");
};

}  // namespace basin::attention::sm90
