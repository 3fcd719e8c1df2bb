// Few rows (decode): the time is that of reading keys and values, so all heads go through memory together, sixteen keys
// at a time, and what comes next is fetched meanwhile. For the kernel source only.
#pragma once

#include "attention/cpu/read_ahead.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

struct FewRowsScratch {
  alignas(64) float keys[kLanes * kMaxHead];
  alignas(64) float x[kMaxBlockRows][kTileKeys];  // scores, then probabilities
  float rescale[kMaxBlockRows];
  std::uint64_t mask[2][kMaxBlockRows];  // of this tile and of the next
};

#if defined(__AVX512F__)
// Registers suffice to transpose sixteen keys straight into the dot products, for some rows at a time.
constexpr bool kPacks = false;

// Scores of R rows, whose queries lie at q, and sixteen keys, `offset` bytes after each row pointer.
template <Storage kStorage, int R>
BASIN_INLINE void group_scores(const std::byte* const* key, std::ptrdiff_t offset, int d, const float* q,
                               const float*, float (*out)[kTileKeys], const Ahead& ahead) {
  const int n = steps<kStorage>(d);
  Array<F16, R> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA { sum[r] = set(0.0f); });
  each_columns(n, [&](int s, auto columns) BASIN_LAMBDA {
    const std::ptrdiff_t at = offset + step_bytes<kStorage>() * s;
    Array<F16, columns> column;
    transpose_words<columns>([&](auto i) BASIN_LAMBDA { return load_steps<kStorage, columns>(key[i] + at); },
                             column,
                             [&](auto i, auto& word) BASIN_LAMBDA { ahead.fetch_after(word, key[i] + at); });
    unroll<columns>([&](auto c) BASIN_LAMBDA {
      unroll<R>([&](auto r) BASIN_LAMBDA {
        sum[r] = score_step<kStorage>(set(q[r * n + s + c]), column[c], sum[r]);
      });
    });
  });
  unroll<R>([&](auto r) BASIN_LAMBDA { store(sum[r], out[r]); });
}
#else
// Keys are packed once for all rows.
constexpr bool kPacks = true;

template <Storage kStorage, int R>
BASIN_INLINE void group_scores(const std::byte* const*, std::ptrdiff_t, int d, const float* q,
                               const float* packed, float (*out)[kTileKeys], const Ahead&) {
  scores<kStorage, R, 1>(q, steps<kStorage>(d), packed, out);
}
#endif

template <Storage kStorage>
class FewRows {
 public:
  FewRows(const Block& block, const State& state, void* scratch)
      : block_(block),
        state_(state),
        scratch_(*static_cast<FewRowsScratch*>(scratch)),
        ahead_(block, stored_bytes<kStorage>()) {}

  void run(std::int64_t begin, std::int64_t end, std::int64_t next) {
    Found found[2];
    found[0].mask = scratch_.mask[0];
    found[1].mask = scratch_.mask[1];
    bool more = find_tile(block_, begin, end, found[0]);
    if (more) ahead_.append(found[0]);
    for (unsigned window = 0; more; window += 2 * kGroups) {
      const Found& here = found[window / (2 * kGroups) % 2];
      Found& after = found[1 - window / (2 * kGroups) % 2];
      more = find_tile(block_, here.begin + kTileKeys, end, after);
      // At the end of the segment, the first keys of that which this thread is likely to take next.
      if (more || (next >= 0 && find_tile(block_, next, next + kTileKeys, after))) ahead_.append(after);
      tile_scores(here, window);
      tile_softmax(here);
      tile_values(here, window + kGroups);
    }
    fold_lanes(block_.heads * block_.rows, state_.l);
  }

 private:
  // Calls body(first row of a head, Index<number of rows>()) for all rows of a head, as many at once as fit.
  template <typename Body>
  BASIN_INLINE void each_rows(const Body& body) {
    for (int r = 0; r < block_.rows; r += kMaxRows) {
      const int left = block_.rows - r;
      with_rows(left < kMaxRows ? left : kMaxRows, [&](auto rows) BASIN_LAMBDA { body(r, rows); });
    }
  }

  BASIN_INLINE void tile_scores(const Found& tile, unsigned window) {
    for (int g = first_group(tile.any); g < end_group(tile.any); ++g) {
      const std::int64_t sinks =
          block_.q_sink == nullptr ? 0 : block_.sink_tokens - tile.begin - g * kLanes;  // of these keys
      for (int head = 0; head < block_.heads; ++head) {
        const Ahead ahead = ahead_.during(window + static_cast<unsigned>(g), head);
        const std::byte* const* key = tile.key + g * kLanes;
        const std::ptrdiff_t offset = head * block_.k_head_bytes;
        if constexpr (kPacks) {
          fetch_group(key, offset, ahead);
          pack_group<kStorage>(key, offset, block_.d_qk, scratch_.keys);
        }
        each_rows([&](int r, auto rows) BASIN_LAMBDA {
          const int row = head * block_.rows + r;
          const auto x = reinterpret_cast<float(*)[kTileKeys]>(scratch_.x[row] + g * kLanes);
          const auto scores_of = [&](const void* queries, float(*out)[kTileKeys]) {
            const float* q = static_cast<const float*>(queries) +
                             static_cast<std::ptrdiff_t>(row) * steps<kStorage>(block_.d_qk);
            group_scores<kStorage, rows>(key, offset, block_.d_qk, q, scratch_.keys, out, ahead);
          };
          scores_of(sinks > 0 ? block_.q_sink : block_.q, x);
          if (sinks <= 0 || sinks >= kLanes) return;
          alignas(64) Matrix<float, rows, kTileKeys> other;
          scores_of(block_.q, other);
          const std::uint32_t lanes = group_bits(bits(0, sinks), 0);
          for (int i = 0; i < rows; ++i) store(choose(lanes, load(x[i]), load(other[i])), x[i]);
        });
      }
    }
  }

  BASIN_INLINE void fetch_group(const std::byte* const* key, std::ptrdiff_t offset, const Ahead& ahead) {
    for (int i = 0; i < kLanes; ++i) {
      for (int at = 0; at < block_.d_qk * stored_bytes<kStorage>(); at += kCacheLine) {
        ahead.fetch(key[i] + offset + at);
      }
    }
  }

  BASIN_INLINE void tile_softmax(const Found& tile) {
    softmax_rows<kStorage>(block_, {tile.mask, block_.rows}, block_.heads * block_.rows,
                           first_group(tile.any), end_group(tile.any), scratch_.x, state_.m, state_.l,
                           scratch_.rescale);
  }

  BASIN_INLINE void tile_values(const Found& tile, unsigned window) {
    for (int g = first_group(tile.any); g < end_group(tile.any); ++g) {
      const std::uint64_t group = shift_left(0xffff, g * kLanes);
      for (int head = 0; head < block_.heads; ++head) {
        const Values values = {tile.value, head * block_.v_head_bytes};
        const Ahead ahead = ahead_.during(window + static_cast<unsigned>(g), head);
        each_rows([&](int r, auto rows) BASIN_LAMBDA {
          const int row = head * block_.rows + r;
          const std::uint64_t* mask = tile.mask + r;
          std::uint64_t any = 0, all = group;
          for (int i = 0; i < rows; ++i) {
            any |= mask[i] & group;
            all &= mask[i];
          }
          accumulate_all<kStorage, rows>(values, mask, any, all, scratch_.x + row, scratch_.rescale + row,
                                         state_.acc + static_cast<std::ptrdiff_t>(row) * block_.d_v,
                                         block_.d_v, ahead);
        });
      }
      // Once per tile: from here on the products with 1 change nothing.
      for (int row = 0; row < block_.heads * block_.rows; ++row) scratch_.rescale[row] = 1.0f;
    }
  }

  const Block& block_;
  const State& state_;
  FewRowsScratch& scratch_;
  ReadAhead ahead_;
};

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET
