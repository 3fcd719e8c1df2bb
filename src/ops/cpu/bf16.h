// Products of bf16 weights with bf16 activations, where the target has dots of pairs. Outputs lie in lanes, as in int8.h: each
// is one chain of pair dots over ascending k; what the last 32 elements lack is zero.
#pragma once

#include "ops/cpu/row_group.h"

#if defined(__AVX512BF16__)

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

constexpr std::int64_t kStep = 32;  // elements that are transposed together
constexpr std::int64_t kStepBytes = 2 * kStep;
constexpr std::int64_t kStepWords = kStep / 2;

BASIN_INLINE F16 pair_dot(const F16& sum, const Words& pairs, std::uint32_t x) {
  F16 r;
  r.part[0].raw = _mm512_dpbf16_ps(sum.part[0].raw, reinterpret_cast<__m512bh>(pairs.all),
                                   reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x))));
  return r;
}

// The same for what is left of `inputs` elements after the whole steps.
template <typename Put>
BASIN_INLINE void transpose_rest(const RowGroup& group, std::int64_t inputs, const Put& put) {
  alignas(64) std::byte rest[kGroupRows * kStepBytes] = {};
  const std::int64_t whole = inputs / kStep * kStep;
  for (int r = 0; r < kGroupRows; ++r)
    __builtin_memcpy(rest + r * kStepBytes, group.rows + r * group.row_bytes + 2 * whole,
                     static_cast<std::size_t>(2 * (inputs - whole)));
  transpose_line(rest, kStepBytes, put);
}

// One token times one group.
void multiply_bf16(const Panel& panel, const RowGroup& group) {
  const std::int64_t inputs = panel.x.inputs, whole = inputs / kStep;
  F16 sum = set(0.0f);
  const auto join = [&](std::int64_t step) BASIN_LAMBDA {
    const Ahead<kStepBytes, kStepWords> ahead(group, step * kStepBytes);
    return [&sum, ahead, x = panel.x.data + step * kStepBytes](auto w, const Words& pairs) BASIN_LAMBDA {
      sum = pair_dot(sum, pairs, word_at(x + 4 * w));
      ahead.template fetch<decltype(w)::value>();
    };
  };
  for (std::int64_t s = 0; s < whole; ++s)
    transpose_line(group.rows + s * kStepBytes, group.row_bytes, join(s));
  if (whole * kStep < inputs) transpose_rest(group, inputs, join(whole));
  finish_group(panel, group, 0, sum);
}

// Pairs of a group, those of each step behind those of the one before. With `kFetches` the group behind it is fetched meanwhile.
template <bool kFetches>
void pack_bf16(const RowGroup& group, std::int64_t inputs, std::byte* to) {
  const std::int64_t whole = inputs / kStep;
  const auto keep = [&](std::int64_t step) BASIN_LAMBDA {
    const Ahead<kStepBytes, kStepWords> ahead(group, step * kStepBytes);
    return [ahead, to = to + step * kStepWords * kWordsBytes](auto w, const Words& pairs) BASIN_LAMBDA {
      store_words(pairs, to + w * kWordsBytes);
      if constexpr (kFetches) ahead.template fetch<decltype(w)::value>();
    };
  };
  for (std::int64_t s = 0; s < whole; ++s)
    transpose_line(group.rows + s * kStepBytes, group.row_bytes, keep(s));
  if (whole * kStep < inputs) transpose_rest(group, inputs, keep(whole));
}

#if defined(BASIN_TARGET_amx)
// Sums of G groups and T tokens. Cores that have AMX do two FMAs in the time of one VDPBF16PS, and two FMAs, upper halves first and
// small numbers flushed, are what that computes: bit for bit for 240 million sums of all exponents, on an EPYC and a Xeon.
template <int G, int T>
__attribute__((noinline)) void sum_by_fmas(const Panel& panel, const std::byte* const (&packed)[G],
                                           std::int64_t token, F16 (&out)[G][T]) {
  constexpr std::int64_t kPart = 4 * kLanes;  // words that are widened together
  const std::byte* x = panel.x.data + token * panel.x.row_bytes;
  const std::int64_t words = (panel.x.inputs + kStep - 1) / kStep * kStepWords;
  alignas(64) float upper[T][kPart], lower[T][kPart];
  F16 sum[G][T];
  unroll<G>([&](auto g) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { sum[g][t] = set(0.0f); }); });
  const auto upper_of = [](const Words& a) BASIN_LAMBDA { return as_floats(a & set_words(0xffff0000u)); };
  const auto lower_of = [](const Words& a) BASIN_LAMBDA { return as_floats(shift_left<16>(a)); };
  for (std::int64_t begin = 0; begin < words; begin += kPart) {
    const std::int64_t count = words - begin < kPart ? words - begin : kPart;
    for (int t = 0; t < T; ++t) {
      for (std::int64_t w = 0; w < count; w += kLanes) {
        const Words pairs = load_words(x + t * panel.x.row_bytes + (begin + w) * 4);
        store(upper_of(pairs), upper[t] + w);
        store(lower_of(pairs), lower[t] + w);
      }
    }
    for (std::int64_t w = 0; w < count; ++w) {
      F16 a[G], b[G];
      unroll<G>([&](auto g) BASIN_LAMBDA {
        const Words pairs = load_words(packed[g] + (begin + w) * kWordsBytes);
        a[g] = upper_of(pairs);
        b[g] = lower_of(pairs);
      });
      unroll<T>([&](auto t) BASIN_LAMBDA {
        const F16 x_a = set(upper[t][w]);
        unroll<G>([&](auto g) BASIN_LAMBDA { sum[g][t] = fma(a[g], x_a, sum[g][t]); });
      });
      unroll<T>([&](auto t) BASIN_LAMBDA {
        const F16 x_b = set(lower[t][w]);
        unroll<G>([&](auto g) BASIN_LAMBDA { sum[g][t] = fma(b[g], x_b, sum[g][t]); });
      });
    }
  }
  unroll<G>([&](auto g) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { out[g][t] = sum[g][t]; }); });
}

template <int G, int T>
void bf16_tile_by_fmas(const Panel& panel, const std::byte* const (&packed)[G], const RowGroup (&group)[G],
                       std::int64_t token) {
  F16 sum[G][T];
  const unsigned before = _mm_getcsr();
  constexpr unsigned kFlush = 0x8040, kMasksOfExceptions = 0x1f80;  // to nearest even
  _mm_setcsr(kFlush | kMasksOfExceptions);
  sum_by_fmas<G, T>(panel, packed, token, sum);
  _mm_setcsr(before);
  for (int t = 0; t < T; ++t) {
    for (int g = 0; g < G; ++g) finish_group(panel, group[g], token + t, sum[g][t]);
  }
}
#endif

template <int G, int T>
BASIN_INLINE void bf16_tile(const Panel& panel, const std::byte* const (&packed)[G],
                            const RowGroup (&group)[G], std::int64_t token) {
  const std::byte* x = panel.x.data + token * panel.x.row_bytes;
  const std::int64_t words = (panel.x.inputs + kStep - 1) / kStep * kStepWords;
  F16 sum[G][T];
  unroll<G>([&](auto g) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { sum[g][t] = set(0.0f); }); });
  for (std::int64_t w = 0; w < words; ++w) {
    Words pairs[G];
    unroll<G>([&](auto g) BASIN_LAMBDA { pairs[g] = load_words(packed[g] + w * kWordsBytes); });
    unroll<T>([&](auto t) BASIN_LAMBDA {
      const std::uint32_t a = word_at(x + t * panel.x.row_bytes + w * 4);
      unroll<G>([&](auto g) BASIN_LAMBDA { sum[g][t] = pair_dot(sum[g][t], pairs[g], a); });
    });
  }
  unroll<T>([&](auto t) BASIN_LAMBDA {
    unroll<G>([&](auto g) BASIN_LAMBDA { finish_group(panel, group[g], token + t, sum[g][t]); });
  });
}

void bf16_panel(const Panel& panel) {
  constexpr int kGroups = 2, kTokens = 12;  // 24 sums, two words and what they meet
  static_assert(kGroups * kGroupRows == kRowsAtOnce);
  const std::int64_t packed_floats = (panel.x.inputs + kStep - 1) / kStep * kStepWords * kLanes;
  float* const copy = panel.scratch + kGroups * packed_floats;
  const auto run = [&](std::int64_t row, auto groups) BASIN_LAMBDA {
    RowGroup group[groups];
    const std::byte* packed[groups];
    for (int g = 0; g < groups; ++g) {
      group[g] = group_at(panel, row + g * kGroupRows, copy);
      auto* to = reinterpret_cast<std::byte*>(panel.scratch + g * packed_floats);
      (panel.after != nullptr ? pack_bf16<true> : pack_bf16<false>)(group[g], panel.x.inputs, to);
      packed[g] = to;
    }
    std::int64_t t = 0;
#if defined(BASIN_TARGET_amx)
    for (; t + kTokens <= panel.x.tokens; t += kTokens)
      bf16_tile_by_fmas<groups, kTokens>(panel, packed, group, t);
#endif
    for (; t + kTokens <= panel.x.tokens; t += kTokens) bf16_tile<groups, kTokens>(panel, packed, group, t);
    for (; t + 4 <= panel.x.tokens; t += 4) bf16_tile<groups, 4>(panel, packed, group, t);
    for (; t < panel.x.tokens; ++t) bf16_tile<groups, 1>(panel, packed, group, t);
  };
  if (panel.x.tokens == 1) {
    for (std::int64_t row = 0; row < panel.rows; row += kGroupRows)
      multiply_bf16(panel, group_at(panel, row, copy));
    return;
  }
  for (std::int64_t row = 0; row < panel.rows; row += kRowsAtOnce) {
    if (panel.rows - row > kGroupRows) {
      run(row, Index<kGroups>());
    } else {
      run(row, Index<1>());
    }
  }
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET

#endif
