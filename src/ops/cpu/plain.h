// Products in float: lane k mod 16 sums its elements ascending, then the lanes are folded 8-4-2-1.
#pragma once

#include "ops/cpu/blocks.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

template <Weights kWeights>
constexpr Storage storage() {
  return kWeights == Weights::f16 ? Storage::f16 : kWeights == Weights::bf16 ? Storage::bf16 : Storage::f32;
}

template <Weights kWeights>
constexpr std::int64_t element_bytes() {
  return storage<kWeights>() == Storage::f32 ? 4 : 2;
}

// The last inputs % kStep elements of a row, zeros behind them.
template <int kStep>
struct Tail {
  alignas(64) std::byte bytes[kStep * 4] = {};
  Tail(const std::byte* from, std::int64_t count, std::int64_t size) {
    if (count > 0) __builtin_memcpy(bytes, from, static_cast<std::size_t>(count * size));
  }
};

template <Weights kWeights, int R, int T>
BASIN_INLINE void float_tile(const Panel& panel, const std::byte* weight, std::int64_t row_bytes,
                             std::int64_t row, std::int64_t token) {
  constexpr std::int64_t kSize = element_bytes<kWeights>();
  const std::byte* x = panel.x.data + token * panel.x.row_bytes;
  F16 sum[R][T];
  unroll<R>([&](auto r) BASIN_LAMBDA { unroll<T>([&](auto t) BASIN_LAMBDA { sum[r][t] = set(0.0f); }); });
  const auto step = [&](const auto& weight_at, const auto& x_at) BASIN_LAMBDA {
    F16 w[R];
    unroll<R>([&](auto r) BASIN_LAMBDA { w[r] = load_stored<storage<kWeights>()>(weight_at(r)); });
    unroll<T>([&](auto t) BASIN_LAMBDA {
      const F16 a = load_stored<Storage::f32>(x_at(t));
      unroll<R>([&](auto r) BASIN_LAMBDA { sum[r][t] = fma(w[r], a, sum[r][t]); });
    });
  };
  const std::int64_t whole = panel.x.inputs / kLanes * kLanes;
  for (std::int64_t k = 0; k < whole; k += kLanes) {
    step([&](auto r) BASIN_LAMBDA { return weight + r * row_bytes + k * kSize; },
         [&](auto t) BASIN_LAMBDA { return x + t * panel.x.row_bytes + k * 4; });
  }
  if (const std::int64_t rest = panel.x.inputs - whole; rest > 0) {
    std::byte w[R][kLanes * 4] = {};
    std::byte a[T][kLanes * 4] = {};
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(w[r], weight + r * row_bytes + whole * kSize, static_cast<std::size_t>(rest * kSize));
    }
    for (int t = 0; t < T; ++t) {
      __builtin_memcpy(a[t], x + t * panel.x.row_bytes + whole * 4, static_cast<std::size_t>(rest * 4));
    }
    step([&](auto r) BASIN_LAMBDA { return w[r]; }, [&](auto t) BASIN_LAMBDA { return a[t]; });
  }
  finish_tile<R, T>(panel, sum, row, token);
}

template <Weights kWeights, int R>
void plain_rows(const Panel& panel, const std::byte* weight, std::int64_t row_bytes, std::int64_t row) {
  constexpr int kTokens = kParts == 1 ? 4 : 2;
  std::int64_t t = 0;
  for (; t + kTokens <= panel.x.tokens; t += kTokens)
    float_tile<kWeights, R, kTokens>(panel, weight, row_bytes, row, t);
  for (; t < panel.x.tokens; ++t) float_tile<kWeights, R, 1>(panel, weight, row_bytes, row, t);
}

constexpr int kPlainRows = kParts == 1 ? 4 : 2;

template <Weights kWeights>
void plain_panel(const Panel& panel) {
  const auto weight = [&](std::int64_t row) { return panel.weight + row * panel.row_bytes; };
  std::int64_t row = 0;
  for (; row + kPlainRows <= panel.rows; row += kPlainRows) {
    plain_rows<kWeights, kPlainRows>(panel, weight(row), panel.row_bytes, row);
  }
  for (; row < panel.rows; ++row) plain_rows<kWeights, 1>(panel, weight(row), panel.row_bytes, row);
}

template <Weights kWeights>
void widen_plain(const std::byte* row, std::int64_t inputs, float* out) {
  std::int64_t k = 0;
  for (; k + kLanes <= inputs; k += kLanes)
    store(load_stored<storage<kWeights>()>(row + k * element_bytes<kWeights>()), out + k);
  if (k < inputs) {
    std::byte rest[kLanes * 4] = {};
    float values[kLanes];
    __builtin_memcpy(rest, row + k * element_bytes<kWeights>(),
                     static_cast<std::size_t>((inputs - k) * element_bytes<kWeights>()));
    store(load_stored<storage<kWeights>()>(rest), values);
    __builtin_memcpy(out + k, values, static_cast<std::size_t>((inputs - k) * 4));
  }
}

// Quantised weights with float activations: a few rows at a time are widened, then multiplied as floats.
template <Weights kWeights>
void widened_panel(const Panel& panel) {
  const std::int64_t stride = panel.x.padded;
  const auto run = [&](std::int64_t row, auto count) {
    for (int r = 0; r < count; ++r) {
      widen_row<kWeights>(panel.weight + (row + r) * panel.row_bytes, panel.x.inputs,
                          panel.scratch + r * stride);
    }
    plain_rows<Weights::f32, decltype(count)::value>(panel, reinterpret_cast<const std::byte*>(panel.scratch),
                                                     4 * stride, row);
  };
  std::int64_t row = 0;
  for (; row + kPlainRows <= panel.rows; row += kPlainRows) run(row, Index<kPlainRows>());
  for (; row < panel.rows; ++row) run(row, Index<1>());
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
