// Sixteen float lanes, made of one, two or four registers, for sources that are compiled once per target only.
// Everything here is in an unnamed namespace and inlined: nothing may be shared between targets by the linker.
#pragma once

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/kernel_words.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Index<I> subscripts arrays through int; the compiler warns of a sign change that cannot happen.
#pragma GCC diagnostic ignored "-Wsign-conversion"

#define BASIN_INLINE inline __attribute__((always_inline))
#define BASIN_LAMBDA __attribute__((always_inline))

namespace basin::BASIN_TARGET {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kLanes>;
using DU = hn::RebindToUnsigned<D>;
using DI = hn::RebindToSigned<D>;
using DHalf = hn::Rebind<std::uint16_t, D>;
using V = hn::Vec<D>;
constexpr int kWidth = static_cast<int>(hn::MaxLanes(D()));  // lanes of one register
constexpr int kParts = kLanes / kWidth;
static_assert(kParts * kWidth == kLanes);

// Arrays of a template's extent (a cast inside, for -Wsign-conversion).
template <typename T, int N>
using Array = T[static_cast<std::size_t>(N)];
template <typename T, int N, int M>
using Matrix = Array<Array<T, M>, N>;

template <int I>
struct Index {
  static constexpr int value = I;
  constexpr operator int() const { return I; }
};

// Calls body(Index<0>()), ..., body(Index<N - 1>()). Constant indices let arrays of vectors live in registers.
template <int N, int I = 0, typename Body>
BASIN_INLINE void unroll(const Body& body) {
  if constexpr (I < N) {
    body(Index<I>());
    unroll<N, I + 1>(body);
  }
}

#if defined(__AVX512F__)
// Sixteen 4-byte words, or thirty-two 2-byte ones: those whose bit is set, zero and unread where it is not. The address
// sanitizer does not see masked loads, so it gets one load per word.
template <typename Word, typename Mask>
BASIN_INLINE __m512i load_masked(Mask mask, const std::byte* p) {
#if defined(__SANITIZE_ADDRESS__)
  alignas(64) Word word[64 / sizeof(Word)] = {};
  for (unsigned i = 0; i < 64 / sizeof(Word); ++i) {
    if (((mask >> i) & 1) != 0) __builtin_memcpy(&word[i], p + i * sizeof(Word), sizeof(Word));
  }
  return _mm512_load_si512(word);
#else
  if constexpr (sizeof(Word) == 4) return _mm512_maskz_loadu_epi32(mask, p);
  if constexpr (sizeof(Word) == 2) return _mm512_maskz_loadu_epi16(mask, p);
#endif
}
#endif

struct F16 {
  V part[kParts];
};

template <typename F>
BASIN_INLINE F16 make(const F& f) {
  F16 r;
  unroll<kParts>([&](auto i) BASIN_LAMBDA { r.part[i] = f(i); });
  return r;
}

BASIN_INLINE F16 set(float x) {
  const V v = hn::Set(D(), x);
  return make([&](auto) BASIN_LAMBDA { return v; });
}
BASIN_INLINE F16 load(const float* p) {
  return make([&](auto i) BASIN_LAMBDA { return hn::LoadU(D(), p + i * kWidth); });
}
BASIN_INLINE void store(const F16& a, float* p) {
  unroll<kParts>([&](auto i) BASIN_LAMBDA { hn::StoreU(a.part[i], D(), p + i * kWidth); });
}
BASIN_INLINE F16 add(const F16& a, const F16& b) {
  return make([&](auto i) BASIN_LAMBDA { return hn::Add(a.part[i], b.part[i]); });
}
BASIN_INLINE F16 sub(const F16& a, const F16& b) {
  return make([&](auto i) BASIN_LAMBDA { return hn::Sub(a.part[i], b.part[i]); });
}
BASIN_INLINE F16 mul(const F16& a, const F16& b) {
  return make([&](auto i) BASIN_LAMBDA { return hn::Mul(a.part[i], b.part[i]); });
}
BASIN_INLINE F16 fma(const F16& a, const F16& b, const F16& c) {  // a b + c
  return make([&](auto i) BASIN_LAMBDA { return hn::MulAdd(a.part[i], b.part[i], c.part[i]); });
}
BASIN_INLINE V larger(V a, V b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Gt(a, b), a,
                        b);  // Highway's scalar Max calls std::isnan, a function that could be shared
#else
  return hn::Max(a, b);
#endif
}
BASIN_INLINE F16 max(const F16& a, const F16& b) {
  return make([&](auto i) BASIN_LAMBDA { return larger(a.part[i], b.part[i]); });
}

BASIN_INLINE float max_of_lanes(const F16& a) {
  V m = a.part[0];
  unroll<kParts>([&](auto i) BASIN_LAMBDA { m = larger(m, a.part[i]); });
#if HWY_TARGET == HWY_SCALAR
  return m.raw;
#else
  return hn::GetLane(hn::MaxOfLanes(D(), m));
#endif
}

// The lanes whose bit is set, -inf in the others.
BASIN_INLINE F16 keep(const F16& a, std::uint32_t bits) {
  const V none = hn::Set(D(), -__builtin_inff());
  const auto word = hn::Set(DU(), bits);
  return make([&](auto i) BASIN_LAMBDA {
    const auto bit = hn::Shl(hn::Set(DU(), 1u), hn::Iota(DU(), static_cast<unsigned>(i * kWidth)));
    return hn::IfThenElse(hn::RebindMask(D(), hn::TestBit(word, bit)), a.part[i], none);
  });
}

// Lanes of `a` where the bit is set, else lanes of `b`.
BASIN_INLINE F16 choose(std::uint32_t bits, const F16& a, const F16& b) {
  const auto word = hn::Set(DU(), bits);
  return make([&](auto i) BASIN_LAMBDA {
    const auto bit = hn::Shl(hn::Set(DU(), 1u), hn::Iota(DU(), static_cast<unsigned>(i * kWidth)));
    return hn::IfThenElse(hn::RebindMask(D(), hn::TestBit(word, bit)), a.part[i], b.part[i]);
  });
}

// 2^x within 1 ulp for x <= 0 (and a little above), correct into the subnormals; -inf gives 0, 0 gives 1, NaN stays.
BASIN_INLINE V exp2(V x) {
  const D d;
  const V lowest = hn::Set(d, -160.0f);  // 2^-160 rounds to zero
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  const V magic = hn::Set(d, 0x1.8p23f);  // adding it rounds to an integer, to nearest even
  const V shifted = hn::Add(x, magic);
  const V f = hn::Sub(x, hn::Sub(shifted, magic));
  // (2^f - 1) / f on [-1/2, 1/2] interpolated at Chebyshev nodes; relative error of 2^f 9.2e-9.
  V p = hn::Set(d, 0x1.44138ap-13f);
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.5f0890p-10f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b2a54p-7f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6af6cp-5f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbe0p-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e430p-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
#if defined(__AVX512F__)
  return V{_mm512_scalef_ps(p.raw, hn::Sub(shifted, magic).raw)};
#else
  const DI di;
  // Two factors, so that the only rounding is that of the last product, also for subnormal results.
  const auto n = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  const auto half = hn::ShiftRight<1>(n);
  const auto bias = hn::Set(di, 127);
  const V first = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V second = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(n, half), bias)));
  return hn::Mul(hn::Mul(p, first), second);
#endif
}
BASIN_INLINE F16 exp2(const F16& a) {
  return make([&](auto i) BASIN_LAMBDA { return exp2(a.part[i]); });
}

// tanh within 3 ulp: an odd polynomial near zero, (1 - t) / (1 + t) with t = exp(-2 |x|) elsewhere.
BASIN_INLINE V tanh(V x) {
  const D d;
  const V a = hn::Abs(x);
  const V z = hn::Mul(x, x);
  // (tanh(y) / y - 1) / y^2 in z = y^2 on [0, 0.625^2], interpolated at Chebyshev nodes; relative error 4.2e-9.
  V p = hn::Set(d, 0.0022927450481802225f);
  p = hn::MulAdd(p, z, hn::Set(d, -0.008343945257365704f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.02176891826093197f));
  p = hn::MulAdd(p, z, hn::Set(d, -0.053959257900714874f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.13333304226398468f));
  p = hn::MulAdd(p, z, hn::Set(d, -0.3333333432674408f));
  const V near = hn::MulAdd(hn::Mul(p, z), x, x);
  const V t = exp2(hn::Mul(a, hn::Set(d, -2.885390081777927f)));  // -2 log2(e)
  const V one = hn::Set(d, 1.0f);
  const V far = hn::CopySign(hn::Div(hn::Sub(one, t), hn::Add(one, t)), x);
  return hn::IfThenElse(hn::Lt(a, hn::Set(d, 0.625f)), near, far);
}
BASIN_INLINE F16 tanh(const F16& a) {
  return make([&](auto i) BASIN_LAMBDA { return tanh(a.part[i]); });
}

BASIN_INLINE V widen_f16(hn::Vec<DHalf> bits) {
#if defined(__AVX512F__)
  return V{_mm512_cvtph_ps(bits.raw)};
#elif defined(__F16C__)
  return V{_mm256_cvtph_ps(bits.raw)};
#else
  const DU du;
  const auto word = hn::PromoteTo(du, bits);
  const auto magnitude = hn::And(word, hn::Set(du, 0x7fffu));
  const auto sign = hn::ShiftLeft<16>(hn::And(word, hn::Set(du, 0x8000u)));
  // Exact for every finite value, subnormals included; infinity and NaN take the largest exponent instead.
  const V scaled = hn::Mul(hn::BitCast(D(), hn::ShiftLeft<13>(magnitude)), hn::Set(D(), 0x1p112f));
  const auto special = hn::VecFromMask(hn::Gt(hn::BitCast(DI(), magnitude), hn::Set(DI(), 0x7bff)));
  const auto exponent = hn::And(hn::BitCast(du, special), hn::Set(du, 0x7f800000u));
  return hn::BitCast(D(), hn::Or(hn::Or(hn::BitCast(du, scaled), exponent), sign));
#endif
}

BASIN_INLINE V widen_bf16(hn::Vec<DHalf> bits) {
#if defined(__AVX512F__)
  // One instruction instead of two: element i goes to the upper half of lane i, zero to the lower half.
  const __m512i index = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5,
                                         0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  constexpr __mmask32 kUpper = 0xaaaaaaaau;
  return V{
      _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpper, index, _mm512_castsi256_si512(bits.raw)))};
#else
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits)));
#endif
}

// Sixteen stored elements as floats.
template <Storage kStorage>
BASIN_INLINE F16 load_stored(const std::byte* p) {
  if constexpr (kStorage == Storage::f32) {
    return make([&](auto i)
                    BASIN_LAMBDA { return hn::LoadU(D(), reinterpret_cast<const float*>(p) + i * kWidth); });
  } else {
    return make([&](auto i) BASIN_LAMBDA {
      const auto bits = hn::LoadU(DHalf(), reinterpret_cast<const std::uint16_t*>(p) + i * kWidth);
      if constexpr (kStorage == Storage::bf16) {
        return widen_bf16(bits);
      } else {
        return widen_f16(bits);
      }
    });
  }
}

// Rounds x, 0 <= x <= 1 or NaN, to the storage type (to nearest even), and leaves it a float.
template <Storage kStorage>
BASIN_INLINE V round_probability(V x) {
  const D d;
  const DU du;
  if constexpr (kStorage == Storage::f32) return x;
  const auto u = hn::BitCast(du, x);
  const auto is_number = hn::Eq(x, x);
  if constexpr (kStorage == Storage::bf16) {
    const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
    const auto r = hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fffu)));
    return hn::IfThenElse(is_number, hn::BitCast(d, hn::And(r, hn::Set(du, 0xffff0000u))), x);
  } else {
    const auto odd = hn::And(hn::ShiftRight<13>(u), hn::Set(du, 1u));
    const auto r = hn::And(hn::Add(u, hn::Add(odd, hn::Set(du, 0xfffu))), hn::Set(du, 0xffffe000u));
    // Below 2^-14 the step is 2^-24, which is that of floats from 1/2 on.
    const V half = hn::Set(d, 0.5f);
    const V small = hn::Sub(hn::Add(x, half), half);
    const V rounded = hn::IfThenElse(hn::Lt(x, hn::Set(d, 0x1p-14f)), small, hn::BitCast(d, r));
    return hn::IfThenElse(is_number, rounded, x);
  }
}
template <Storage kStorage>
BASIN_INLINE F16 round_probability(const F16& a) {
  return make([&](auto i) BASIN_LAMBDA { return round_probability<kStorage>(a.part[i]); });
}

}  // namespace
}  // namespace basin::BASIN_TARGET
