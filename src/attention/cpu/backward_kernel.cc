// The micro-kernel of the backward pass: five products per tile of keys. One source for every target.
#include "attention/cpu/backward_kernel.h"

#include "attention/cpu/tile.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

struct BackwardScratch {
  alignas(64) float keys[kTileKeys * kMaxHead];      // packed
  alignas(64) float values[kTileKeys * kMaxHead];    // packed
  alignas(64) float key_rows[kTileKeys * kMaxHead];  // as floats
  alignas(64) float p[kPairRows][kTileKeys];
  alignas(64) float ds[kPairRows][kTileKeys];
  std::uint64_t mask[kChunkRows];
};

// A tile of keys, prepared for all rows.
struct BackwardTile {
  const float* keys;    // packed
  const float* values;  // packed
  Values key_rows;      // as floats
};

// Turns R rows of scores and of dP into P and dS.
BASIN_INLINE void softmax_backward(const BackwardBlock& block, int row, int rows, const std::uint64_t* mask,
                                   int first, int last, float (*p)[kTileKeys], float (*ds)[kTileKeys]) {
  const F16 scale = set(block.scale), zero = set(0.0f), one = set(1.0f);
  const bool capped = block.scores.softcap != 0.0f;
  const F16 cap = set(capped ? 1.0f / block.scores.softcap : 0.0f);
  for (int r = 0; r < rows; ++r) {
    finish_scores(block.scores, mask[r], first, last, p[r]);
    const F16 lse2 = set(block.lse2[row + r]), big_d = set(block.big_d[row + r]);
    for (int g = first; g < last; ++g) {
      const F16 x = load(p[r] + g * kLanes);
      const F16 probability = exp2(sub(x, lse2));
      F16 slope = mul(sub(load(ds[r] + g * kLanes), big_d), scale);
      if (capped) {
        const F16 t = mul(x, cap);  // of the tanh
        slope = mul(slope, sub(one, mul(t, t)));
      }
      // A key that the row does not see may hold anything.
      store(choose(group_bits(mask[r], g), mul(probability, slope), zero), ds[r] + g * kLanes);
      store(probability, p[r] + g * kLanes);
    }
  }
}

// to[key][d .. d + 16 NV) += sum over ascending rows of weight[row][key] value[row] for K keys. A row that does not see a key
// does not even multiply by zero.
template <int K, int NV>
BASIN_INLINE void accumulate_keys(const float (*weight)[kTileKeys], const std::uint64_t* mask, int rows,
                                  int key, const float* value, int d_all, int d, float* to) {
  Matrix<F16, K, NV> sum;
  float* at = to + static_cast<std::ptrdiff_t>(key) * d_all + d;
  unroll<K>([&](auto k) BASIN_LAMBDA {
    unroll<NV>([&](auto i) BASIN_LAMBDA {
      sum[k][i] = load(at + static_cast<std::ptrdiff_t>(k) * d_all + i * kLanes);
    });
  });
  constexpr std::uint64_t kAll = (std::uint64_t{1} << static_cast<unsigned>(K)) - 1;
  for (int r = 0; r < rows; ++r) {
    const std::uint64_t sees = shift_right(mask[r], key) & kAll;
    if (sees == 0) continue;
    const float* from = value + static_cast<std::ptrdiff_t>(r) * d_all + d;
    Array<F16, NV> x;
    unroll<NV>([&](auto i) BASIN_LAMBDA { x[i] = load(from + i * kLanes); });
    const float* w = weight[r] + key;
    if (sees == kAll) {
      unroll<K>([&](auto k) BASIN_LAMBDA {
        const F16 factor = set(w[k]);
        unroll<NV>([&](auto i) BASIN_LAMBDA { sum[k][i] = fma(factor, x[i], sum[k][i]); });
      });
    } else {
      unroll<K>([&](auto k) BASIN_LAMBDA {
        if ((shift_right(sees, k) & 1) == 0) return;
        const F16 factor = set(w[k]);
        unroll<NV>([&](auto i) BASIN_LAMBDA { sum[k][i] = fma(factor, x[i], sum[k][i]); });
      });
    }
  }
  unroll<K>([&](auto k) BASIN_LAMBDA {
    unroll<NV>([&](auto i) BASIN_LAMBDA {
      store(sum[k][i], at + static_cast<std::ptrdiff_t>(k) * d_all + i * kLanes);
    });
  });
}

template <int K>
void accumulate_keys_all(const float (*weight)[kTileKeys], const std::uint64_t* mask, int rows, int key,
                         const float* value, int d_all, float* to) {
  int d = 0;
  for (; d + kMaxGroups * kLanes <= d_all; d += kMaxGroups * kLanes)
    accumulate_keys<K, kMaxGroups>(weight, mask, rows, key, value, d_all, d, to);
  if constexpr (kMaxGroups > 1) {
    for (; d < d_all; d += kLanes) accumulate_keys<K, 1>(weight, mask, rows, key, value, d_all, d, to);
  }
}

// R rows, from `row` on (whose P and dS are p[0], ds[0]): P, dS and dq.
template <Storage kStorage, int R>
void rows_backward(const BackwardBlock& block, const BackwardTile& tile, const std::uint64_t* mask, int row,
                   float (*p)[kTileKeys], float (*ds)[kTileKeys]) {
  std::uint64_t any = 0, all = ~std::uint64_t{0};
  for (int r = 0; r < R; ++r) {
    any |= mask[r];
    all &= mask[r];
  }
  if (any == 0) return;
  const int first = first_group(any), last = end_group(any);
  const int d_qk = block.scores.d_qk, d_v = block.scores.d_v;
  const auto rows_of = [&](const void* packed, int d) {
    return static_cast<const float*>(packed) + static_cast<std::ptrdiff_t>(row) * steps<kStorage>(d);
  };
  score_groups<kStorage, R>(rows_of(block.scores.q, d_qk), steps<kStorage>(d_qk), tile.keys, first, last, p);
  score_groups<kStorage, R>(rows_of(block.dout, d_v), steps<kStorage>(d_v), tile.values, first, last, ds);
  softmax_backward(block, row, R, mask, first, last, p, ds);
  Array<float, R> ones;
  for (int r = 0; r < R; ++r) ones[r] = 1.0f;
  NothingAhead nothing;
  accumulate_all<Storage::f32, R>(tile.key_rows, mask, any, all, ds, ones,
                                  block.dq + static_cast<std::ptrdiff_t>(row) * d_qk, d_qk, nothing);
}

template <Storage kStorage>
void run(const BackwardBlock& block, std::int64_t begin, std::int64_t end, BackwardScratch& scratch) {
  const Block& scores = block.scores;
  const int d_qk = scores.d_qk, d_v = scores.d_v;
  const std::byte* widened[kTileKeys];
  for (int i = 0; i < kTileKeys; ++i)
    widened[i] = reinterpret_cast<const std::byte*>(scratch.key_rows + static_cast<std::ptrdiff_t>(i) * d_qk);

  Found found;
  found.mask = scratch.mask;
  for (std::int64_t at = begin; find_tile(scores, at, end, found); at = found.begin + kTileKeys) {
    for (int g = first_group(found.any); g < end_group(found.any); ++g) {
      const auto packed = [&](float* to, int d) {
        return to + static_cast<std::ptrdiff_t>(g) * steps<kStorage>(d) * kLanes;
      };
      pack_group<kStorage>(found.key + g * kLanes, 0, d_qk, packed(scratch.keys, d_qk));
      pack_group<kStorage>(found.value + g * kLanes, 0, d_v, packed(scratch.values, d_v));
    }
    if (kStorage != Storage::f32) widen_values<kStorage>(found.key, 0, d_qk, scratch.key_rows);
    const BackwardTile tile = {
        scratch.keys, scratch.values, {kStorage == Storage::f32 ? found.key : widened, 0}};
    float* dk = block.dk + (found.begin - begin) * d_qk;
    float* dv = block.dv + (found.begin - begin) * d_v;
    for (int pair = 0; pair < scores.rows; pair += kPairRows) {
      const int rows = scores.rows - pair < kPairRows ? scores.rows - pair : kPairRows;
      const std::uint64_t* mask = found.mask + pair;
      std::uint64_t any = 0;
      for (int r = 0; r < rows; ++r) any |= mask[r];
      if (any == 0) continue;
      for (int r = 0; r < rows; r += kMaxRows) {
        with_rows(rows - r < kMaxRows ? rows - r : kMaxRows, [&](auto count) BASIN_LAMBDA {
          rows_backward<kStorage, count>(block, tile, mask + r, pair + r, scratch.p + r, scratch.ds + r);
        });
      }
      const float* q_rows = block.q_rows + static_cast<std::ptrdiff_t>(pair) * d_qk;
      const float* dout_rows = block.dout_rows + static_cast<std::ptrdiff_t>(pair) * d_v;
      for (int key = 0; key < kTileKeys; key += kMaxRows) {
        const int left = kTileKeys - key < kMaxRows ? kTileKeys - key : kMaxRows;
        if ((shift_right(any, key) & (shift_left(1, left) - 1)) == 0) continue;
        with_rows(left, [&](auto count) BASIN_LAMBDA {
          accumulate_keys_all<count>(scratch.ds, mask, rows, key, q_rows, d_qk, dk);
          accumulate_keys_all<count>(scratch.p, mask, rows, key, dout_rows, d_v, dv);
        });
      }
    }
  }
}

void run_backward(const BackwardBlock& block, std::int64_t begin, std::int64_t end, void* memory) {
  BackwardScratch& scratch = *static_cast<BackwardScratch*>(memory);
  switch (block.scores.storage) {
    case Storage::f32:
      return run<Storage::f32>(block, begin, end, scratch);
    case Storage::f16:
      return run<Storage::f16>(block, begin, end, scratch);
    case Storage::bf16:
      return run<Storage::bf16>(block, begin, end, scratch);
  }
}

template <Storage kStorage>
void pack_both(int d, int rows, const std::byte* const* row, void* packed, float* floats) {
  for (int r = 0; r < rows; ++r) {
    float* to = floats + static_cast<std::ptrdiff_t>(r) * d;
    for (int c = 0; c < d; c += kLanes)
      store(load_stored<kStorage>(row[r] + stored_bytes<kStorage>() * c), to + c);
  }
  if (packed != floats) pack_queries<kStorage>(d, rows, row, static_cast<float*>(packed));
}

void run_pack_rows(Storage storage, int d, int rows, const std::byte* const* row, void* packed,
                   float* floats) {
  switch (storage) {
    case Storage::f32:
      return pack_both<Storage::f32>(d, rows, row, packed, floats);
    case Storage::f16:
      return pack_both<Storage::f16>(d, rows, row, packed, floats);
    case Storage::bf16:
      return pack_both<Storage::bf16>(d, rows, row, packed, floats);
  }
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET

namespace basin::attention::cpu {

BackwardKernel backward_kernel(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
  return {sizeof(BackwardScratch), run_pack_rows, run_backward};
}

}  // namespace basin::attention::cpu
