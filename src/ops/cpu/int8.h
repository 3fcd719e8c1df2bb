// Products of quantised weights with int8 activations. Outputs lie in lanes: sixteen rows are unpacked together (groups.h),
// and each word of theirs meets the four activations that it multiplies, for all rows at once. Integer sums are exact, so
// only the float part has an order, one chain for each output: over blocks of 32 ascending (over runs of 16 where the format
// has a scale for each), the dot joins by fma(dot, d_w d_a, sum), and then the block's offset by fma(m, d_a * sum of a, sum).
// One token takes the unpacked words as they come; more share a copy of them in the nearer caches.
#pragma once

#include "ops/cpu/groups.h"
#include "ops/cpu/row_group.h"

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

// Calls body(block of the row, its address, its header) for each block.
template <typename F, typename Body>
BASIN_INLINE void each_block(const RowGroup& group, std::int64_t inputs, const Body& body) {
  const std::int64_t blocks = inputs / F::kElements;
  const std::byte* block = group.rows;
  for (std::int64_t b = 0; b < blocks; ++b, block += F::kBytes)
    body(b, block, F::read(block, group.row_bytes));
}

// One token times sixteen rows.
template <typename F>
void multiply_group(const Panel& panel, const RowGroup& group) {
  constexpr std::int64_t kRuns = F::kElements / kBlock;
  const Token x(panel.x, 0);
  F16 sum = set(0.0f);
  each_block<F>(
      group, panel.x.inputs, [&](std::int64_t b, const std::byte* block, const auto& header) BASIN_LAMBDA {
        constexpr int kPuts = static_cast<int>(kRuns) * kBlockWords;
        const Ahead<F::kBytes, kPuts> ahead(group, b * F::kBytes);
        unroll<static_cast<int>(kRuns) / F::kUnit>([&](auto unit) BASIN_LAMBDA {
          const std::int64_t first = b * kRuns + unit * F::kUnit;  // run of the token
          const std::byte* q = x.q + first * kBlock;
          Words dots[F::kUnit * F::kScales];
          unroll<F::kUnit * F::kScales>([&](auto i) BASIN_LAMBDA {
            dots[i] = start<F>(x.half_sum + first * 2 + i * (2 / F::kScales));
          });
          F::template unpack<decltype(unit)::value>(
              block, group.row_bytes, header, [&](auto run, auto w, const Words& words) BASIN_LAMBDA {
                Words& to = dots[run * F::kScales + w * F::kScales / kBlockWords];
                to = dot<F::kSign>(to, words, word_at(q + run * kBlock + w * 4));
                ahead.template fetch<(unit * F::kUnit + run) * kBlockWords + w>();
              });
          unroll<F::kUnit>([&](auto run) BASIN_LAMBDA {
            F16 d[F::kScales], m;
            F::template factors<unit * F::kUnit + run>(header, d, m);
            const F16 d_a = set(x.scale[first + run]);
            unroll<F::kScales>([&](auto i) BASIN_LAMBDA {
              sum = fma(to_floats(dots[run * F::kScales + i]), mul(d[i], d_a), sum);
            });
            if constexpr (F::kHasMin) sum = fma(m, set(x.scaled_sum[first + run]), sum);
          });
        });
      });
  finish_group(panel, group, 0, sum);
}

/// Sixteen rows unpacked: for each block of 32, kBlockWords Words, its d's and its m.
struct Packed {
  std::byte* q;
  float* d;
  float* m;
};

// With `kFetches` the group behind it is fetched meanwhile.
template <typename F, bool kFetches>
void pack_group(const RowGroup& group, std::int64_t inputs, const Packed to) {
  constexpr std::int64_t kRuns = F::kElements / kBlock;
  constexpr int kPuts = static_cast<int>(kRuns) * kBlockWords;
  each_block<F>(group, inputs, [&](std::int64_t b, const std::byte* block, const auto& header) BASIN_LAMBDA {
    const Ahead<F::kBytes, kPuts> ahead(group, b * F::kBytes);
    unroll<static_cast<int>(kRuns) / F::kUnit>([&](auto unit) BASIN_LAMBDA {
      const std::int64_t first = b * kRuns + unit * F::kUnit;
      F::template unpack<decltype(unit)::value>(
          block, group.row_bytes, header, [&](auto run, auto w, const Words& words) BASIN_LAMBDA {
            store_words(words, to.q + ((first + run) * kBlockWords + w) * kWordsBytes);
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
  const auto run = [&](auto groups) {
    RowGroup group[groups];
    Packed to[groups];
    for (int g = 0; g < groups; ++g) {
      group[g] = group_at(panel, row + g * kGroupRows, free);
      to[g] = packed[g];
      (is_long(panel) ? pack_group<F, true> : pack_group<F, false>)(group[g], panel.x.inputs, to[g]);
    }
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
  for (std::int64_t b = 0; b < padded / kBlock; ++b) {
    std::int8_t values[kBlock] = {};
    float d = 0.0f;
    int sum[2] = {};
    if (b * kBlock < inputs) {
      const F16 low = load(x + b * kBlock), high = load(x + b * kBlock + kLanes);
      const auto magnitude = [](const F16& a) BASIN_LAMBDA {
        return make([&](auto i) BASIN_LAMBDA { return hn::Abs(a.part[i]); });
      };
      const float largest = max_of_lanes(max(magnitude(low), magnitude(high)));
      // Any NaN or infinity makes x - x a NaN, and so this sum.
      const float check = fold(add(sub(low, low), sub(high, high)));
      if (check != 0.0f) {
        d = __builtin_nanf("");
      } else if (largest > 0.0f) {
        d = largest / 127.0f;
        // 127 / largest overflows for subnormal blocks; they are so small that zero is right to float's range.
        const float inverse = largest >= 0x1p-119f ? 127.0f / largest : 0.0f;
        alignas(64) float scaled[kBlock];
        store(mul(low, set(inverse)), scaled);
        store(mul(high, set(inverse)), scaled + kLanes);
        for (int i = 0; i < kBlock; ++i) {
          const float magic = 0x1.8p23f;  // rounds to an integer, to nearest even
          const int value = static_cast<int>((scaled[i] + magic) - magic);
          values[i] = static_cast<std::int8_t>(value);
          sum[i / kLanes] += value;
        }
      }
    }
    scale[b] = d;
    scaled_sum[b] = d * static_cast<float>(sum[0] + sum[1]);
    half_sum[2 * b] = sum[0];
    half_sum[2 * b + 1] = sum[1];
    __builtin_memcpy(q + b * kBlock, values, kBlock);
  }
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
