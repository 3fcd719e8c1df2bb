// Products of quantised weights with int8 activations. Outputs lie in lanes: sixteen rows are unpacked together (groups.h),
// and each word of theirs meets the four activations that it multiplies, for all rows at once. Integer sums are exact, so
// only the float part has an order, one chain for each output: over blocks of 32 ascending (over runs of 16 where the format
// has a scale for each), the dot joins by fma(dot, d_w d_a, sum), and then the block's offset by fma(m, d_a * sum of a, sum).
// One token takes the unpacked words as they come; more share a copy of them in the nearer caches.
#pragma once

#include "ops/cpu/groups.h"
#include "ops/cpu/row_group.h"
#include "ops/cpu/tiles.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

// Where the sums over the elements of one scale begin. `half_sum` has sums of sixteen activations each.
template <typename F>
BASIN_INLINE Words start([[maybe_unused]] const std::int32_t* half_sum) {
  if constexpr (starts_below<F::kSign>()) {
    const std::int32_t sum = F::kScales == 2 ? half_sum[0] : half_sum[0] + half_sum[1];
    return set_words(static_cast<std::uint32_t>(-F::kBias * sum));
  } else {
    return set_words(0);
  }
}

// The activations of one token.
struct Token {
  const std::byte* q;
  const float* scale;       // of each block
  const float* scaled_sum;  // of each block
  const std::int32_t* half_sum;

  Token(const Prepared& x, std::int64_t token)
      : q(x.data + token * x.row_bytes),
        scale(x.scale + token * (x.padded / kBlock)),
        scaled_sum(x.scaled_sum + token * (x.padded / kBlock)),
        half_sum(x.half_sum + token * (x.padded / kBlock * 2)) {}
};

// Calls body(block of the row, its address, its header) for each block from `first` on.
template <typename F, typename Body>
BASIN_INLINE void each_block(const RowGroup& group, std::int64_t inputs, std::int64_t first,
                             const Body& body) {
  const std::int64_t blocks = inputs / F::kElements;
  const std::byte* block = group.rows + first * F::kBytes;
  for (std::int64_t b = first; b < blocks; ++b, block += F::kBytes)
    body(b, block, F::read(block, group.row_bytes));
}

// The sum of one token and sixteen rows, which one run after the other joins.
template <typename F>
struct GroupSum {
  const Token& x;
  F16 sum = set(0.0f);

  // What the run's dots begin with.
  BASIN_INLINE Words begin(std::int64_t run, int part) const {
    return start<F>(x.half_sum + run * 2 + part * (2 / F::kScales));
  }

  BASIN_INLINE void join(std::int64_t run, const Words* dots, const F16 (&d)[F::kScales],
                         [[maybe_unused]] const F16& m) {
    const F16 d_a = set(x.scale[run]);
    unroll<F::kScales>([&](auto i) BASIN_LAMBDA { sum = fma(to_floats(dots[i]), mul(d[i], d_a), sum); });
    if constexpr (F::kHasMin) sum = fma(m, set(x.scaled_sum[run]), sum);
  }
};

#if defined(__AVX512F__)
template <typename F>
concept HasNibbles = requires {
  F::kNibbles;
};

// Blocks that are multiplied together, those of a line's bytes.
constexpr int kLineBlocks = 3;

// Three blocks from `b` on. The bytes of a line of each row are transposed whole, with a third of the loads that blocks one by one
// take. Words then straddle the blocks: of activations, what meets another's bytes is zero.
template <typename F>
BASIN_INLINE void join_line(const RowGroup& group, std::int64_t b, GroupSum<F>& sum) {
  const Ahead<kLineBlocks * F::kBytes, 16> ahead(group, b * F::kBytes);
  const std::byte* q = sum.x.q + b * kBlock;
  Words dots[kLineBlocks], head[kLineBlocks];
  unroll<kLineBlocks>([&](auto i) BASIN_LAMBDA { dots[i] = sum.begin(b + i, 0); });
  transpose_line(group.rows + b * F::kBytes, group.row_bytes, [&](auto w, const Words& words) BASIN_LAMBDA {
    constexpr int kAt = 4 * w;
    const Words low = F::element(field<0, 15>(words)), high = F::element(field<4, 15>(words));
    unroll<kLineBlocks>([&](auto i) BASIN_LAMBDA {
      constexpr int kBegin = i * static_cast<int>(F::kBytes);
      if constexpr (kBegin / 4 == w) head[i] = shift_right<kBegin % 4 * 8>(words);
      constexpr int kFirst = kAt - kBegin - F::kNibbles;  // nibble of the block that the word begins with
      if constexpr (kFirst > -4 && kFirst < 16) {
        const auto activations = [&](int half) BASIN_LAMBDA {
          const std::byte* from = q + i * kBlock + half * 16 + kFirst;
          if constexpr (kFirst < 0) return word_at(from - kFirst) << (-8 * kFirst);
          if constexpr (kFirst > 12) return word_at(from + 12 - kFirst) >> (8 * (kFirst - 12));
          return word_at(from);
        };
        dots[i] = dot<F::kSign>(dots[i], low, activations(0));
        dots[i] = dot<F::kSign>(dots[i], high, activations(1));
      }
    });
    ahead.template fetch<decltype(w)::value>();
  });
  unroll<kLineBlocks>([&](auto i) BASIN_LAMBDA {
    F16 d[F::kScales], m;
    F::template factors<0>(Header{{head[i]}}, d, m);
    sum.join(b + i, &dots[i], d, m);
  });
}
#endif

// One token times sixteen rows.
template <typename F>
void multiply_group(const Panel& panel, const RowGroup& group) {
  constexpr std::int64_t kRuns = F::kElements / kBlock;
  const Token x(panel.x, 0);
  GroupSum<F> sum{x};
  std::int64_t done = 0;
#if defined(__AVX512F__)
  if constexpr (HasNibbles<F>) {
    for (; done * F::kBytes + kCacheLine <= group.row_bytes; done += kLineBlocks)
      join_line<F>(group, done, sum);
  }
#endif
  each_block<F>(
      group, panel.x.inputs, done,
      [&](std::int64_t b, const std::byte* block, const auto& header) BASIN_LAMBDA {
        constexpr int kPuts = static_cast<int>(kRuns) * kBlockWords;
        const Ahead<F::kBytes, kPuts> ahead(group, b * F::kBytes);
        unroll<static_cast<int>(kRuns) / F::kUnit>([&](auto unit) BASIN_LAMBDA {
          const std::int64_t first = b * kRuns + unit * F::kUnit;  // run of the token
          const std::byte* q = x.q + first * kBlock;
          Words dots[F::kUnit * F::kScales];
          unroll<F::kUnit * F::kScales>(
              [&](auto i) BASIN_LAMBDA { dots[i] = sum.begin(first + i / F::kScales, i % F::kScales); });
          F::template unpack<decltype(unit)::value>(
              block, group.row_bytes, header, [&](auto run, auto w, const Words& words) BASIN_LAMBDA {
                Words& to = dots[run * F::kScales + w * F::kScales / kBlockWords];
                to = dot<F::kSign>(to, words, word_at(q + run * kBlock + w * 4));
                ahead.template fetch<(unit * F::kUnit + run) * kBlockWords + w>();
              });
          unroll<F::kUnit>([&](auto run) BASIN_LAMBDA {
            F16 d[F::kScales], m;
            F::template factors<unit * F::kUnit + run>(header, d, m);
            sum.join(first + run, &dots[run * F::kScales], d, m);
          });
        });
      });
  finish_group(panel, group, 0, sum.sum);
}

// With `kFetches` the group behind it is fetched meanwhile. `bias` is taken away from each element.
template <typename F, bool kFetches>
void pack_group(const RowGroup& group, std::int64_t inputs, int bias, const Packed to) {
  constexpr std::int64_t kRuns = F::kElements / kBlock;
  constexpr int kPuts = static_cast<int>(kRuns) * kBlockWords;
  each_block<F>(
      group, inputs, 0, [&](std::int64_t b, const std::byte* block, const auto& header) BASIN_LAMBDA {
        const Ahead<F::kBytes, kPuts> ahead(group, b * F::kBytes);
        unroll<static_cast<int>(kRuns) / F::kUnit>([&](auto unit) BASIN_LAMBDA {
          const std::int64_t first = b * kRuns + unit * F::kUnit;
          F::template unpack<decltype(unit)::value>(
              block, group.row_bytes, header, [&](auto run, auto w, const Words& words) BASIN_LAMBDA {
                store_words(bias == 0 ? words : less_bytes(words, bias),
                            to.q + ((first + run) * kBlockWords + w) * kWordsBytes);
                if constexpr (kFetches) ahead.template fetch<(unit * F::kUnit + run) * kBlockWords + w>();
              });
          unroll<F::kUnit>([&](auto run) BASIN_LAMBDA {
            F16 d[F::kScales], m;
            F::template factors<unit * F::kUnit + run>(header, d, m);
            unroll<F::kScales>(
                [&](auto i) BASIN_LAMBDA { store(d[i], to.d + ((first + run) * F::kScales + i) * kLanes); });
            if constexpr (F::kHasMin) store(m, to.m + (first + run) * kLanes);
          });
        });
      });
}

/// What a tile needs to know of a format.
template <Sign kTheSign, int kTheBias, int kTheScales, bool kTheMin>
struct Traits {
  static constexpr Sign kSign = kTheSign;
  static constexpr int kBias = kTheBias, kScales = kTheScales;
  static constexpr bool kHasMin = kTheMin;
};

// G groups of unpacked rows times T tokens.
template <typename F, int G, int T>
BASIN_INLINE void packed_tile(const Panel& panel, const Packed (&packed)[G], const RowGroup (&group)[G],
                              std::int64_t token) {
  const std::int64_t blocks = panel.x.inputs / kBlock;
  const Token x(panel.x, token);
  const std::int64_t x_blocks = panel.x.padded / kBlock;
  F16 sum[G][T];
  unroll<G>([&](auto g) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { sum[g][t] = set(0.0f); }); });
  for (std::int64_t b = 0; b < blocks; ++b) {
    unroll<F::kScales>([&](auto part) BASIN_LAMBDA {
      constexpr int kWords = kBlockWords / F::kScales;
      Words dots[G][T];
      unroll<T>([&](auto t) BASIN_LAMBDA {
        const Words from = start<F>(x.half_sum + t * x_blocks * 2 + b * 2 + part);
        unroll<G>([&](auto g) BASIN_LAMBDA { dots[g][t] = from; });
      });
      unroll<kWords>([&](auto i) BASIN_LAMBDA {
        const std::int64_t w = b * kBlockWords + part * kWords + i;
        Words q[G];
        unroll<G>([&](auto g) BASIN_LAMBDA { q[g] = load_words(packed[g].q + w * kWordsBytes); });
        unroll<T>([&](auto t) BASIN_LAMBDA {
          const std::uint32_t a = word_at(x.q + t * panel.x.row_bytes + w * 4);
          unroll<G>([&](auto g) BASIN_LAMBDA { dots[g][t] = dot<F::kSign>(dots[g][t], q[g], a); });
        });
      });
      F16 d[G];
      unroll<G>([&](auto g) BASIN_LAMBDA { d[g] = load(packed[g].d + (b * F::kScales + part) * kLanes); });
      unroll<T>([&](auto t) BASIN_LAMBDA {
        const F16 d_a = set(x.scale[t * x_blocks + b]);
        unroll<G>([&](auto g)
                      BASIN_LAMBDA { sum[g][t] = fma(to_floats(dots[g][t]), mul(d[g], d_a), sum[g][t]); });
      });
    });
    if constexpr (F::kHasMin) {
      F16 m[G];
      unroll<G>([&](auto g) BASIN_LAMBDA { m[g] = load(packed[g].m + b * kLanes); });
      unroll<T>([&](auto t) BASIN_LAMBDA {
        const F16 s = set(x.scaled_sum[t * x_blocks + b]);
        unroll<G>([&](auto g) BASIN_LAMBDA { sum[g][t] = fma(m[g], s, sum[g][t]); });
      });
    }
  }
  unroll<T>([&](auto t) BASIN_LAMBDA {
    unroll<G>([&](auto g) BASIN_LAMBDA { finish_group(panel, group[g], token + t, sum[g][t]); });
  });
}

// Groups and tokens of the largest tile: two accumulators for each pair, the words and what is multiplied with them fit into
// 32 registers, or 16 of half the size.
constexpr int kTileGroups = kParts == 1 ? 2 : 1;
constexpr int kTileTokens = kParts == 1 ? 6 : 2;

template <typename F, int G>
void packed_tokens(const Panel& panel, const Packed (&packed)[G], const RowGroup (&group)[G]) {
  std::int64_t t = 0;
  for (; t + kTileTokens <= panel.x.tokens; t += kTileTokens)
    packed_tile<F, G, kTileTokens>(panel, packed, group, t);
  if constexpr (kTileTokens > 2) {
    for (; t + 2 <= panel.x.tokens; t += 2) packed_tile<F, G, 2>(panel, packed, group, t);
  }
  for (; t < panel.x.tokens; ++t) packed_tile<F, G, 1>(panel, packed, group, t);
}

template <Weights kWeights>
void int8_panel(const Panel& panel) {
  using F = Group<kWeights>;
  using T = Traits<F::kSign, F::kBias, F::kScales, F::kHasMin>;
  const std::int64_t blocks = panel.x.padded / kBlock;
  float* free = panel.scratch;
  const auto take = [&](std::int64_t floats) {
    float* taken = free;
    free += floats;
    return taken;
  };
  Packed packed[kTileGroups];
  for (Packed& p : packed) {
    p.q = reinterpret_cast<std::byte*>(take(blocks * kBlockWords * kLanes));
    p.d = take(blocks * F::kScales * kLanes);
    p.m = take(F::kHasMin ? blocks * kLanes : 0);
  }
  std::int64_t row = 0;
  if (panel.x.tokens == 1) {
    for (; row < panel.rows; row += kGroupRows) multiply_group<F>(panel, group_at(panel, row, free));
    return;
  }
#if defined(__AMX_INT8__)
  const bool by_tiles = panel.x.tokens >= kAmxTokens;
#else
  constexpr bool by_tiles = false;
#endif
  const auto run = [&](auto groups) {
    RowGroup group[groups];
    Packed to[groups];
    for (int g = 0; g < groups; ++g) {
      group[g] = group_at(panel, row + g * kGroupRows, free);
      to[g] = packed[g];
      (panel.after != nullptr ? pack_group<F, true> : pack_group<F, false>)(group[g], panel.x.inputs,
                                                                            by_tiles ? F::kBias : 0, to[g]);
    }
#if defined(__AMX_INT8__)
    if (by_tiles) {
      all_tokens_by_tiles<T, groups>(panel, to, group);
    } else
#endif
      packed_tokens<T, groups>(panel, to, group);
    row += groups * kGroupRows;
  };
  if constexpr (kTileGroups > 1) {
    while (row + (kTileGroups - 1) * kGroupRows < panel.rows) run(Index<kTileGroups>());
  }
  while (row < panel.rows) run(Index<1>());
}

// One row of activations to int8 blocks. A block with NaN or infinity gets a NaN scale, so that the token's results are NaN.
BASIN_INLINE void quantise_row(const float* x, std::int64_t inputs, std::int64_t padded, std::byte* q,
                               float* scale, float* scaled_sum, std::int32_t* half_sum) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  const Words no_sign = set_words(0x7fffffffu);
  const F16 magic =
      set(0x1.8p23f);  // added, rounds to an integer, to nearest even, whose lowest byte is that of the bits
  for (std::int64_t b = 0; b < padded / kBlock; ++b) {
    float d = 0.0f, inverse = 0.0f;
    F16 half[2] = {set(0.0f), set(0.0f)};
    if (b * kBlock < inputs) {
      unroll<2>([&](auto i) BASIN_LAMBDA { half[i] = load(x + b * kBlock + i * kLanes); });
      // Magnitudes are in the order of their bits, with infinity and then NaN behind all numbers.
      const std::uint32_t bits = largest(larger(as_words(half[0]) & no_sign, as_words(half[1]) & no_sign));
      float most;
      __builtin_memcpy(&most, &bits, 4);
      if (bits >= kInfinity) {
        d = __builtin_nanf("");
        unroll<2>([&](auto i) BASIN_LAMBDA { half[i] = set(0.0f); });
      } else if (bits != 0) {
        d = most / 127.0f;
        // 127 / most overflows for subnormal blocks; they are so small that zero is right to float's range.
        if (most >= 0x1p-119f) inverse = 127.0f / most;
      }
    }
    int sum[2];
    unroll<2>([&](auto i) BASIN_LAMBDA {
      const Words rounded = as_words(add(mul(half[i], set(inverse)), magic));
      sum[i] = store_low_bytes(rounded, q + b * kBlock + i * kLanes);
    });
    scale[b] = d;
    scaled_sum[b] = d * static_cast<float>(sum[0] + sum[1]);
    half_sum[2 * b] = sum[0];
    half_sum[2 * b + 1] = sum[1];
  }
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
