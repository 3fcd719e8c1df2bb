// The kernels of ops, compiled once per CPU target.
#include "ops/cpu/kernel.h"

#include "ops/cpu/bf16.h"
#include "ops/cpu/int8.h"
#include "ops/cpu/plain.h"
#include "ops/cpu/vec.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

constexpr float kLog2E = 1.44269504f;

void prepare(const float* x, std::int64_t x_stride, const Prepared& to) {
  for (std::int64_t t = 0; t < to.tokens; ++t) {
    const float* from = x + t * x_stride;
    std::byte* row = const_cast<std::byte*>(to.data) + t * to.row_bytes;
    if (to.form == Activations::bf16) {
      for (std::int64_t k = 0; k < to.inputs; ++k) {
        std::uint32_t u;
        __builtin_memcpy(&u, from + k, 4);
        const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
        const std::uint32_t rounded = is_nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        const auto half = static_cast<std::uint16_t>(rounded);
        __builtin_memcpy(row + 2 * k, &half, 2);
      }
      __builtin_memset(row + 2 * to.inputs, 0, static_cast<std::size_t>(2 * (to.padded - to.inputs)));
    } else {
      const std::int64_t blocks = to.padded / kBlock;
      quantise_row(from, to.inputs, to.padded, row, const_cast<float*>(to.scale) + t * blocks,
                   const_cast<float*>(to.scaled_sum) + t * blocks,
                   const_cast<std::int32_t*>(to.half_sum) + t * blocks * 2);
    }
  }
}

template <Weights kWeights>
struct Constant {
  static constexpr Weights value = kWeights;
};

constexpr bool is_plain(Weights weights) {
  return weights == Weights::f32 || weights == Weights::f16 || weights == Weights::bf16;
}

// Calls body(Constant<weights>()), for what differs by format.
template <typename Body>
BASIN_INLINE void with_constant(Weights weights, const Body& body) {
  switch (weights) {
    case Weights::f32:
      return body(Constant<Weights::f32>());
    case Weights::f16:
      return body(Constant<Weights::f16>());
    case Weights::bf16:
      return body(Constant<Weights::bf16>());
    case Weights::q8_0:
      return body(Constant<Weights::q8_0>());
    case Weights::q4_0:
      return body(Constant<Weights::q4_0>());
    case Weights::q4_1:
      return body(Constant<Weights::q4_1>());
    case Weights::q5_0:
      return body(Constant<Weights::q5_0>());
    case Weights::q5_1:
      return body(Constant<Weights::q5_1>());
    case Weights::q4_k:
      return body(Constant<Weights::q4_k>());
    case Weights::q5_k:
      return body(Constant<Weights::q5_k>());
    case Weights::q6_k:
      return body(Constant<Weights::q6_k>());
    case Weights::mxfp4:
      return body(Constant<Weights::mxfp4>());
  }
}

void panel(const Panel& p) {
#if defined(__AVX512BF16__)
  if (p.x.form == Activations::bf16) return bf16_panel(p);
#endif
  with_constant(p.weights, [&](auto weights) BASIN_LAMBDA {
    if constexpr (is_plain(weights.value)) {
      plain_panel<weights.value>(p);
    } else if (p.x.form == Activations::f32) {
      widened_panel<weights.value>(p);
    } else {
      int8_panel<weights.value>(p);
    }
  });
}

void widen(Weights weights, const std::byte* row, std::int64_t inputs, float* out) {
  with_constant(weights, [&](auto constant) BASIN_LAMBDA {
    if constexpr (is_plain(constant.value)) {
      widen_plain<constant.value>(row, inputs, out);
    } else {
      widen_row<constant.value>(row, inputs, out);
    }
  });
}

// Calls body(load, store, offset) for every sixteen elements and for the rest.
template <typename Body>
BASIN_INLINE void each(std::int64_t count, const Body& body) {
  std::int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    body(
        k, [](const float* p) BASIN_LAMBDA { return load(p); },
        [](const F16& v, float* p) BASIN_LAMBDA { store(v, p); });
  }
  if (const std::int64_t rest = count - k; rest > 0) {
    body(
        k, [rest](const float* p) BASIN_LAMBDA { return load_some(p, rest, 0.0f); },
        [rest](const F16& v, float* p) BASIN_LAMBDA { store_some(v, p, rest); });
  }
}

void rms_norm(const float* x, const float* weight, float eps, float* y, std::int64_t width) {
  F16 squares = set(0.0f);
  each(width, [&](std::int64_t k, auto get, auto) BASIN_LAMBDA {
    const F16 v = get(x + k);
    squares = fma(v, v, squares);
  });
  const float mean = fold(squares) / static_cast<float>(width);
  const F16 inverse = set(1.0f / __builtin_sqrtf(mean + eps));
  each(width, [&](std::int64_t k, auto get, auto put)
                  BASIN_LAMBDA { put(mul(mul(get(x + k), inverse), get(weight + k)), y + k); });
}

// x sigmoid(z), with exp of a negative number only.
BASIN_INLINE F16 times_sigmoid(const F16& x, const F16& z) {
  return make([&](auto i) BASIN_LAMBDA {
    const D d;
    const V one = hn::Set(d, 1.0f);
    const V t = exp2(hn::Mul(hn::Abs(z.part[i]), hn::Set(d, -kLog2E)));
    const V numerator = hn::IfThenElse(hn::Lt(z.part[i], hn::Zero(d)), t, one);
    return hn::Mul(x.part[i], hn::Div(numerator, hn::Add(one, t)));
  });
}

void silu_multiply(const float* gate, const float* up, float* y, std::int64_t count) {
  each(count, [&](std::int64_t k, auto get, auto put) BASIN_LAMBDA {
    const F16 x = get(gate + k);
    put(mul(times_sigmoid(x, x), get(up + k)), y + k);
  });
}

// (1 + tanh(z)) / 2 = sigmoid(2 z), so gelu needs no tanh.
void gelu_multiply(const float* gate, const float* up, float* y, std::int64_t count) {
  constexpr float kTwoRootTwoOverPi = 1.59576912f;
  each(count, [&](std::int64_t k, auto get, auto put) BASIN_LAMBDA {
    const F16 x = get(gate + k);
    const F16 inner = mul(x, fma(mul(x, x), set(0.044715f), set(1.0f)));
    put(mul(times_sigmoid(x, mul(inner, set(kTwoRootTwoOverPi))), get(up + k)), y + k);
  });
}

// At most `limit`; NaN stays NaN.
BASIN_INLINE F16 at_most(const F16& x, float limit) {
  return make([&](auto i) BASIN_LAMBDA {
    const V bound = hn::Set(D(), limit);
    return hn::IfThenElse(hn::Gt(x.part[i], bound), bound, x.part[i]);
  });
}

BASIN_INLINE F16 at_least(const F16& x, float limit) {
  return make([&](auto i) BASIN_LAMBDA {
    const V bound = hn::Set(D(), limit);
    return hn::IfThenElse(hn::Lt(x.part[i], bound), bound, x.part[i]);
  });
}

void swiglu_clamped(const float* gate, const float* up, float limit, float* y, std::int64_t count) {
  each(count, [&](std::int64_t k, auto get, auto put) BASIN_LAMBDA {
    const F16 g = at_most(get(gate + k), limit);
    const F16 u = at_least(at_most(get(up + k), limit), -limit);
    put(mul(times_sigmoid(g, mul(g, set(1.702f))), add(u, set(1.0f))), y + k);
  });
}

void add_to(float* x, const float* y, std::int64_t count) {
  each(count,
       [&](std::int64_t k, auto get, auto put) BASIN_LAMBDA { put(add(get(x + k), get(y + k)), x + k); });
}

double log_sum_exp(const float* x, std::int64_t count) {
  constexpr float kInf = __builtin_inff();
  F16 largest = set(-kInf);
  std::int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) largest = max(largest, load(x + k));
  if (k < count) largest = max(largest, load_some(x + k, count - k, -kInf));
  const float m = max_of_lanes(largest);
  if (m == -kInf || m == kInf) return static_cast<double>(m);
  constexpr std::int64_t kRun = 1024;
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kRun) {
    const std::int64_t end = begin + kRun < count ? begin + kRun : count;
    F16 sum = set(0.0f);
    for (k = begin; k + kLanes <= end; k += kLanes)
      sum = add(sum, exp2(mul(sub(load(x + k), set(m)), set(kLog2E))));
    if (k < end) sum = add(sum, exp2(mul(sub(load_some(x + k, end - k, -kInf), set(m)), set(kLog2E))));
    total += static_cast<double>(fold(sum));
  }
  return static_cast<double>(m) + __builtin_log(total);
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET

namespace basin::ops::cpu {

Kernel kernel(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
#if defined(__AVX512BF16__)
  constexpr bool kBf16Dots = true;
#else
  constexpr bool kBf16Dots = false;
#endif
  return {kBf16Dots,     prepare,       panel,          widen,  rms_norm,
          silu_multiply, gelu_multiply, swiglu_clamped, add_to, log_sum_exp};
}

}  // namespace basin::ops::cpu
