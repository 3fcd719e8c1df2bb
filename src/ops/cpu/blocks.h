// How one row's quantised blocks become floats: 64 elements at a time as unsigned bytes q, with the factors that make values
// of them:
//   value = d (q - kBias) + m
// with one d for each 16 elements of the unpacked order and one m for each block of 32.
#pragma once

#include "ops/cpu/bytes.h"
#include "ops/cpu/groups.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

// The factors of 64 elements.
struct Factors {
  float d[4];  // of each 16 elements, in unpacked order
  float m[2];  // of each 32 elements, in stored order; 0 where the format has none
};

/// Blocks of 32 whose byte i holds the elements i (low bits) and i + 16 (high bits). Two blocks unpack together, to
/// [low of the first, low of the second, high of the first, high of the second]. The second may be null: zeros.
struct NibbleBlocks {
  static constexpr std::int64_t kElements = 32;
  static constexpr bool kNibbles = true;

  template <int kAt>  // byte of the block where the nibbles begin
  static BASIN_INLINE Bytes nibbles(const std::byte* first, const std::byte* second) {
    return two_fields<0, 4, 15>(join(first + kAt, second == nullptr ? nullptr : second + kAt));
  }

  // The fifth bits of a block are a word, bit i for element i.
  template <int kAt>
  static BASIN_INLINE std::uint64_t fifth_bits(const std::byte* first, const std::byte* second) {
    std::uint32_t a, b = 0;
    __builtin_memcpy(&a, first + kAt, 4);
    if (second != nullptr) __builtin_memcpy(&b, second + kAt, 4);
    const std::uint64_t low = (a & 0xffffu) | b << 16, high = a >> 16 | (b & 0xffff0000u);
    return low | high << 32;
  }

  template <typename At>  // At(block): a float of a block
  static BASIN_INLINE void alternate(const At& at, const std::byte* first, const std::byte* second,
                                     float (&d)[4]) {
    d[0] = d[2] = at(first);
    d[1] = d[3] = second == nullptr ? 0.0f : at(second);
  }
};

BASIN_INLINE void put_halves(const std::byte* first, const std::byte* second, float (&m)[2]) {
  m[0] = half_to_float(first + 2);
  m[1] = second == nullptr ? 0.0f : half_to_float(second + 2);
}

template <Weights kWeights>
struct Format;

template <>
struct Format<Weights::q4_0> : NibbleBlocks {
  static constexpr std::int64_t kBytes = 18;
  static constexpr int kBias = 8;
  static constexpr bool kHasMin = false;
  static BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second, Factors& f) {
    alternate(half_to_float, first, second, f.d);
    return nibbles<2>(first, second);
  }
};

template <>
struct Format<Weights::q4_1> : NibbleBlocks {
  static constexpr std::int64_t kBytes = 20;
  static constexpr int kBias = 0;
  static constexpr bool kHasMin = true;
  static BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second, Factors& f) {
    alternate(half_to_float, first, second, f.d);
    put_halves(first, second, f.m);
    return nibbles<4>(first, second);
  }
};

template <>
struct Format<Weights::q5_0> : NibbleBlocks {
  static constexpr std::int64_t kBytes = 22;
  static constexpr int kBias = 16;
  static constexpr bool kHasMin = false;
  static BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second, Factors& f) {
    alternate(half_to_float, first, second, f.d);
    return add_where<16>(nibbles<6>(first, second), fifth_bits<2>(first, second));
  }
};

template <>
struct Format<Weights::q5_1> : NibbleBlocks {
  static constexpr std::int64_t kBytes = 24;
  static constexpr int kBias = 0;
  static constexpr bool kHasMin = true;
  static BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second, Factors& f) {
    alternate(half_to_float, first, second, f.d);
    put_halves(first, second, f.m);
    return add_where<16>(nibbles<8>(first, second), fifth_bits<4>(first, second));
  }
};

template <>
struct Format<Weights::mxfp4> : NibbleBlocks {
  static constexpr std::int64_t kBytes = 17;
  static constexpr int kBias = 12;
  static constexpr bool kHasMin = false;
  // Half of 2^(e - 127); the smallest two are subnormal.
  static BASIN_INLINE float half_scale(const std::byte* block) {
    const auto e = static_cast<std::uint32_t>(block[0]);
    const std::uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    float d;
    __builtin_memcpy(&d, &bits, 4);
    return d;
  }
  static BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second, Factors& f) {
    alternate(half_scale, first, second, f.d);
    return lookup(kTwiceE2m1, nibbles<1>(first, second));
  }
};

template <>
struct Format<Weights::q8_0> {
  static constexpr std::int64_t kElements = 32;
  static constexpr bool kNibbles = false;
  static constexpr std::int64_t kBytes = 34;
  static constexpr int kBias = 128;
  static constexpr bool kHasMin = false;
  static BASIN_INLINE Bytes unpack(const std::byte* first, const std::byte* second, Factors& f) {
    f.d[0] = f.d[1] = half_to_float(first);
    f.d[2] = f.d[3] = second == nullptr ? 0.0f : half_to_float(second);
    const HalfBytes none = {};
    return flip_sign(
        concatenate(load_half_bytes(first + 2), second == nullptr ? none : load_half_bytes(second + 2)));
  }
};

/// Blocks of 256, unpacked by quarters in stored order.
struct SuperBlocks {
  static constexpr std::int64_t kElements = 256;
  static constexpr bool kNibbles = false;
};

// Eight pairs of 6-bit integers in 12 bytes (q4_k, q5_k), times d and -m: one d for each 16 elements, one m for each 32.
BASIN_INLINE void factors_of_pairs(const std::byte* block, float (&d)[16], float (&m)[16]) {
  std::uint32_t word[3];
  __builtin_memcpy(word, block + 4, 12);
  const std::uint32_t scale[2] = {word[0] & 0x3f3f3f3fu,
                                  (word[2] & 0x0f0f0f0fu) | (word[0] >> 2 & 0x30303030u)};
  const std::uint32_t minimum[2] = {word[1] & 0x3f3f3f3fu,
                                    (word[2] >> 4 & 0x0f0f0f0fu) | (word[1] >> 2 & 0x30303030u)};
  alignas(16) std::byte twice[16];
#if defined(__AVX2__)
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scale));
  _mm_store_si128(reinterpret_cast<__m128i*>(twice), _mm_unpacklo_epi8(eight, eight));
#else
  for (int i = 0; i < 16; ++i) twice[i] = static_cast<std::byte>(scale[i / 8] >> (i / 2 % 4 * 8) & 0xff);
#endif
  alignas(16) std::byte minimums[16] = {};
  __builtin_memcpy(minimums, minimum, 8);
  store(mul(widen_bytes(twice), set(half_to_float(block))), d);
  store(mul(widen_bytes(minimums), set(-half_to_float(block + 2))), m);
}

template <>
struct Format<Weights::q4_k> : SuperBlocks {
  static constexpr std::int64_t kBytes = 144;
  static constexpr int kBias = 0;
  static constexpr bool kHasMin = true;
  static BASIN_INLINE void factors(const std::byte* block, float (&d)[16], float (&m)[16]) {
    factors_of_pairs(block, d, m);
  }
  template <int kQuarter>
  static BASIN_INLINE Bytes unpack(const std::byte* block) {
    return two_fields<0, 4, 15>(load_half_bytes(block + 16 + 32 * kQuarter));
  }
};

template <>
struct Format<Weights::q5_k> : SuperBlocks {
  static constexpr std::int64_t kBytes = 176;
  static constexpr int kBias = 0;
  static constexpr bool kHasMin = true;
  static BASIN_INLINE void factors(const std::byte* block, float (&d)[16], float (&m)[16]) {
    factors_of_pairs(block, d, m);
  }
  template <int kQuarter>
  static BASIN_INLINE Bytes unpack(const std::byte* block) {
    const Bytes low = two_fields<0, 4, 15>(load_half_bytes(block + 48 + 32 * kQuarter));
    return above<4>(low, two_fields<2 * kQuarter, 2 * kQuarter + 1, 1>(load_half_bytes(block + 16)));
  }
};

template <>
struct Format<Weights::q6_k> : SuperBlocks {
  static constexpr std::int64_t kBytes = 210;
  static constexpr int kBias = 32;
  static constexpr bool kHasMin = false;
  static BASIN_INLINE void factors(const std::byte* block, float (&d)[16], float (&)[16]) {
    alignas(16) std::byte shifted[16];  // int8 + 128
    for (int i = 0; i < 16; ++i) shifted[i] = block[192 + i] ^ std::byte{0x80};
    const F16 scale = sub(widen_bytes(shifted), set(128.0f));
    store(mul(scale, set(half_to_float(block + 208))), d);
  }
  template <int kQuarter>
  static BASIN_INLINE Bytes unpack(const std::byte* block) {
    constexpr int kHalf = kQuarter / 2, kUpper = kQuarter % 2;
    const Bytes low = field<4 * kUpper, 15>(load_bytes(block + 64 * kHalf));
    const HalfBytes high = load_half_bytes(block + 128 + 32 * kHalf);
    return above<4>(low, two_fields<4 * kUpper, 4 * kUpper + 2, 3>(high));
  }
};

// Calls body(group, q, d, m) for every 64 elements of a row: four d and two m. An odd last block of 32 comes with q = 0 and
// d = m = 0 in the place of its neighbour.
template <typename F, typename Body>
BASIN_INLINE void each_group(const std::byte* row, std::int64_t inputs, const Body& body) {
  const std::int64_t blocks = inputs / F::kElements;
  if constexpr (F::kElements == 256) {
    for (std::int64_t b = 0; b < blocks; ++b, row += F::kBytes) {
      alignas(64) float d[16], m[16] = {};
      F::factors(row, d, m);
      unroll<4>([&](auto quarter) BASIN_LAMBDA {
        body(4 * b + quarter, F::template unpack<decltype(quarter)::value>(row), d + 4 * quarter,
             m + 2 * quarter);
      });
    }
  } else {
    const auto pair = [&](std::int64_t b, bool odd) BASIN_LAMBDA {
      const std::byte* first = row + b * F::kBytes;
      Factors f = {};
      const Bytes q = F::unpack(first, odd ? nullptr : first + F::kBytes, f);
      body(b / 2, q, f.d, f.m);
    };
    std::int64_t b = 0;
    for (; b + 2 <= blocks; b += 2) pair(b, false);
    if (b < blocks) pair(b, true);
  }
}

// The first `count` of 64 unpacked elements as floats, in stored order. m is null where the format has none.
void widen_group(const std::byte* q, bool nibbles, int bias, const float* d, const float* m,
                 std::int64_t count, float* out) {
  const F16 zero = set(static_cast<float>(bias));
  for (int run = 0; run < 4; ++run) {
    const int at = nibbles ? run % 2 * 32 + run / 2 * 16 : run * 16;
    if (at >= count) continue;
    F16 value = mul(sub(widen_bytes(q + 16 * run), zero), set(d[run]));
    if (m != nullptr) value = add(value, set(m[at / 32]));
    store(value, out + at);
  }
}

// A row as floats: d (q - kBias), rounded once (exact for all formats), plus m, rounded once.
template <Weights kWeights>
void widen_row(const std::byte* row, std::int64_t inputs, float* out) {
  using F = Format<kWeights>;
  each_group<F>(row, inputs,
                [&](std::int64_t group, const Bytes& q, const float* d, const float* m) BASIN_LAMBDA {
                  alignas(64) std::byte bytes[64];
                  store_bytes(q, bytes);
                  widen_group(bytes, F::kNibbles, F::kBias, d, F::kHasMin ? m : nullptr, inputs - group * 64,
                              out + group * 64);
                });
}

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
