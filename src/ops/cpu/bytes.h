// 64 bytes at a time, in one, two or no registers: what quantised blocks are unpacked with.
#pragma once

#include "ops/cpu/vec.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

#if defined(__AVX512F__)
struct Bytes {
  __m512i all;
};
#elif defined(__AVX2__)
struct Bytes {
  __m256i part[2];
};
#else
struct Bytes {
  std::uint8_t element[64];
};
#endif

#if defined(__AVX2__)
struct HalfBytes {
  __m256i all;
};
#else
struct HalfBytes {
  std::uint8_t element[32];
};
#endif

BASIN_INLINE Bytes load_bytes(const std::byte* p) {
  Bytes r;
#if defined(__AVX512F__)
  r.all = _mm512_loadu_si512(p);
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA {
    r.part[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
  });
#else
  __builtin_memcpy(r.element, p, 64);
#endif
  return r;
}

BASIN_INLINE void store_bytes(const Bytes& a, std::byte* p) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(p, a.all);
#elif defined(__AVX2__)
  unroll<2>([&](auto i)
                BASIN_LAMBDA { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32 * i), a.part[i]); });
#else
  __builtin_memcpy(p, a.element, 64);
#endif
}

BASIN_INLINE HalfBytes load_half_bytes(const std::byte* p) {
  HalfBytes r;
#if defined(__AVX2__)
  r.all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
#else
  __builtin_memcpy(r.element, p, 32);
#endif
  return r;
}

// 16 bytes from p, then 16 from q, or zeros where that is null.
BASIN_INLINE HalfBytes join(const std::byte* p, const std::byte* q) {
  HalfBytes r;
#if defined(__AVX2__)
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i second =
      q == nullptr ? _mm_setzero_si128() : _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  r.all = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
#else
  __builtin_memcpy(r.element, p, 16);
  for (int i = 0; i < 16; ++i) r.element[16 + i] = q == nullptr ? 0 : static_cast<std::uint8_t>(q[i]);
#endif
  return r;
}

// The bytes of `first`, then those of `second`.
BASIN_INLINE Bytes concatenate(const HalfBytes& first, const HalfBytes& second) {
  Bytes r;
#if defined(__AVX512F__)
  r.all = _mm512_inserti64x4(_mm512_castsi256_si512(first.all), second.all, 1);
#elif defined(__AVX2__)
  r.part[0] = first.all;
  r.part[1] = second.all;
#else
  __builtin_memcpy(r.element, first.element, 32);
  __builtin_memcpy(r.element + 32, second.element, 32);
#endif
  return r;
}

// (byte >> kShift) & kMask of each.
template <int kShift, int kMask>
BASIN_INLINE Bytes field(const Bytes& a) {
  Bytes r;
#if defined(__AVX512F__)
  r.all = _mm512_and_si512(_mm512_srli_epi16(a.all, kShift), _mm512_set1_epi8(kMask));
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA {
    r.part[i] = _mm256_and_si256(_mm256_srli_epi16(a.part[i], kShift), _mm256_set1_epi8(kMask));
  });
#else
  for (int i = 0; i < 64; ++i) r.element[i] = static_cast<std::uint8_t>((a.element[i] >> kShift) & kMask);
#endif
  return r;
}

// (byte >> kFirst) & kMask of each, then (byte >> kSecond) & kMask of each.
template <int kFirst, int kSecond, int kMask>
BASIN_INLINE Bytes two_fields(const HalfBytes& a) {
#if defined(__AVX2__)
  const auto shifted = [&](auto shift) BASIN_LAMBDA {
    return HalfBytes{_mm256_srli_epi16(a.all, decltype(shift)::value)};
  };
  return field<0, kMask>(concatenate(shifted(Index<kFirst>()), shifted(Index<kSecond>())));
#else
  Bytes r;
  for (int i = 0; i < 32; ++i) {
    r.element[i] = static_cast<std::uint8_t>((a.element[i] >> kFirst) & kMask);
    r.element[32 + i] = static_cast<std::uint8_t>((a.element[i] >> kSecond) & kMask);
  }
  return r;
#endif
}

// low | high * 2^kShift, where nothing leaves its byte.
template <int kShift>
BASIN_INLINE Bytes above(const Bytes& low, const Bytes& high) {
  Bytes r;
#if defined(__AVX512F__)
  r.all = _mm512_or_si512(low.all, _mm512_slli_epi16(high.all, kShift));
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA {
    r.part[i] = _mm256_or_si256(low.part[i], _mm256_slli_epi16(high.part[i], kShift));
  });
#else
  for (int i = 0; i < 64; ++i)
    r.element[i] = static_cast<std::uint8_t>(low.element[i] | high.element[i] << kShift);
#endif
  return r;
}

// kAdded joins every byte whose bit is set.
template <int kAdded>
BASIN_INLINE Bytes add_where(const Bytes& a, std::uint64_t bits) {
  Bytes r;
#if defined(__AVX512F__)
  r.all = _mm512_or_si512(a.all, _mm512_maskz_set1_epi8(bits, kAdded));
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA {
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i word = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(bits >> (32 * i))));
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, which), bit), bit);
    r.part[i] = _mm256_or_si256(a.part[i], _mm256_and_si256(set, _mm256_set1_epi8(kAdded)));
  });
#else
  for (int i = 0; i < 64; ++i)
    r.element[i] = static_cast<std::uint8_t>(a.element[i] | ((bits >> i) & 1) * kAdded);
#endif
  return r;
}

// table[byte] of each; bytes are below 16.
BASIN_INLINE Bytes lookup(const std::uint8_t (&table)[16], const Bytes& a) {
  Bytes r;
#if defined(__AVX2__)
  const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#endif
#if defined(__AVX512F__)
  r.all = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), a.all);
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA {
    r.part[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), a.part[i]);
  });
#else
  for (int i = 0; i < 64; ++i) r.element[i] = table[a.element[i]];
#endif
  return r;
}

// byte + 128 modulo 256: from signed to unsigned and back.
BASIN_INLINE Bytes flip_sign(const Bytes& a) {
  Bytes r;
#if defined(__AVX512F__)
  r.all = _mm512_xor_si512(a.all, _mm512_set1_epi8(-128));
#elif defined(__AVX2__)
  unroll<2>([&](auto i) BASIN_LAMBDA { r.part[i] = _mm256_xor_si256(a.part[i], _mm256_set1_epi8(-128)); });
#else
  for (int i = 0; i < 64; ++i) r.element[i] = static_cast<std::uint8_t>(a.element[i] ^ 0x80);
#endif
  return r;
}

// Sixteen unsigned bytes as floats.
BASIN_INLINE F16 widen_bytes(const std::byte* p) {
  return make([&](auto i) BASIN_LAMBDA {
    const auto bytes =
        hn::LoadU(hn::Rebind<std::uint8_t, D>(), reinterpret_cast<const std::uint8_t*>(p) + i * kWidth);
    return hn::ConvertTo(D(), hn::PromoteTo(DI(), bytes));
  });
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
