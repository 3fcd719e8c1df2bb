// Products of sixteen unpacked rows with int8 activations by AMX tiles: twelve tokens at a time, whose integers leave the tiles
// through memory, for each run of elements that shares a scale. They are the integers that dot() sums, and what follows is the
// float chain of int8.h, so a token has the same bits.
#pragma once

#include "ops/cpu/row_group.h"

#if defined(__AMX_INT8__)

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

constexpr int kAmxTokens = 12;  // of two groups of rows, with their factors, the sums fit into 32 registers

// The intrinsics of GCC 12 do not say what they read.
template <int kTile>
BASIN_INLINE void load_tile(const void* p, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
BASIN_INLINE void store_tile(void* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(std::int64_t{kWordsBytes}), "i"(kTile)
               : "memory");
}
// The dots of kTokens (rows) with kRows (columns), signed bytes.
template <int kDots, int kTokens, int kRows>
BASIN_INLINE void multiply_tiles() {
  asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kDots), "i"(kTokens),
               "i"(kRows));
}

// Four tiles of dots, one of tokens and two of rows: each of kRun elements.
template <int kRun>
BASIN_INLINE void configure_tiles() {
  struct Configuration {
    std::uint8_t palette, start, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } shape = {};
  static_assert(sizeof(Configuration) == 64);
  shape.palette = 1;
  const auto set = [&shape](int tile, int rows, int bytes) {
    shape.rows[tile] = static_cast<std::uint8_t>(rows);
    shape.row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  };
  for (int dots = 0; dots < 4; ++dots) set(dots, kAmxTokens, kWordsBytes);
  set(4, kAmxTokens, kRun);
  set(5, kRun / 4, kWordsBytes);
  set(6, kRun / 4, kWordsBytes);
  asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}
BASIN_INLINE void release_tiles() {
  asm volatile("tilerelease");
}

// G groups of rows, unpacked as signed bytes, times the tokens from `token` on. Of three neighbouring runs one is multiplied, one
// leaves the tiles and one joins the sums: each waits for the one before.
template <typename F, int G>
void tile_of_tokens(const Panel& panel, const Packed (&packed)[G], const RowGroup (&group)[G],
                    std::int64_t token) {
  constexpr int kRun = kBlock / F::kScales, kT = kAmxTokens;
  const std::int64_t runs = panel.x.inputs / kRun, x_blocks = panel.x.padded / kBlock;
  const std::byte* const q = panel.x.data + token * panel.x.row_bytes;
  const float* const scale = panel.x.scale + token * x_blocks;
  const float* const scaled_sum = panel.x.scaled_sum + token * x_blocks;
  alignas(64) std::byte dots[2][G][kT * kWordsBytes];
  F16 sum[G][kT];
  unroll<G>([&](auto g) BASIN_LAMBDA { unroll<kT>([&](auto t) BASIN_LAMBDA { sum[g][t] = set(0.0f); }); });
  const auto step = [&](auto parity, std::int64_t run) BASIN_LAMBDA {
    constexpr int kParity = decltype(parity)::value, kOther = 1 - kParity;
    const bool multiplies = run < runs, stores = run - 1 < runs && run > 0;
    if (multiplies) load_tile<4>(q + run * kRun, panel.x.row_bytes);
    unroll<G>([&](auto g) BASIN_LAMBDA {
      if (multiplies) {
        load_tile<5 + g>(packed[g].q + run * (kRun / 4) * kWordsBytes, kWordsBytes);
        multiply_tiles<2 * kParity + g, 4, 5 + g>();
      }
      if (stores) store_tile<2 * kOther + g>(dots[kOther][g]);
    });
    if (run < 2 || run - 2 >= runs) return;
    const std::int64_t joined = run - 2, block = joined / F::kScales;
    F16 d[G];
    unroll<G>([&](auto g) BASIN_LAMBDA { d[g] = load(packed[g].d + joined * kLanes); });
    unroll<kT>([&](auto t) BASIN_LAMBDA {
      const F16 d_a = set(scale[t * x_blocks + block]);
      unroll<G>([&](auto g) BASIN_LAMBDA {
        sum[g][t] = fma(to_floats(load_words(dots[kParity][g] + t * kWordsBytes)), mul(d[g], d_a), sum[g][t]);
      });
    });
    if constexpr (F::kHasMin) {
      F16 m[G];
      unroll<G>([&](auto g) BASIN_LAMBDA { m[g] = load(packed[g].m + block * kLanes); });
      unroll<kT>([&](auto t) BASIN_LAMBDA {
        const F16 s = set(scaled_sum[t * x_blocks + block]);
        unroll<G>([&](auto g) BASIN_LAMBDA { sum[g][t] = fma(m[g], s, sum[g][t]); });
      });
    }
  };
  for (std::int64_t run = 0; run < runs + 2; run += 2) {
    step(Index<0>(), run);
    step(Index<1>(), run + 1);
  }
  unroll<kT>([&](auto t) BASIN_LAMBDA {
    unroll<G>([&](auto g) BASIN_LAMBDA { finish_group(panel, group[g], token + t, sum[g][t]); });
  });
}

// The last tile may overlap the one before, whose tokens it computes once more.
template <typename F, int G>
void all_tokens_by_tiles(const Panel& panel, const Packed (&packed)[G], const RowGroup (&group)[G]) {
  configure_tiles<kBlock / F::kScales>();
  const std::int64_t last = panel.x.tokens - kAmxTokens;
  for (std::int64_t t = 0; t < last; t += kAmxTokens) tile_of_tokens<F, G>(panel, packed, group, t);
  tile_of_tokens<F, G>(panel, packed, group, last);
  release_tiles();
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET

#endif
