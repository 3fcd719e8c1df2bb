// Element types, and the two 16-bit floats as storage types with explicit conversions.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace basin {

enum class DType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i64,
  i32,
  i16,
  i8,
  u8,
  f8_e4m3,  // 1 sign, 4 exponent (bias 7), 3 fraction bits; no infinity, 0x7f and 0xff are NaN
  // GGUF blocks. d and m are f16, q the stored integers; fields lie in the file as listed.
  q8_0,   // 32: d, int8 q;                                        value = d q
  q4_0,   // 32: d, 4-bit q;                                       value = d (q - 8)
  q4_1,   // 32: d, m, 4-bit q;                                    value = d q + m
  q5_0,   // 32: d, fifth bits, 4-bit q;                           value = d (q - 16)
  q5_1,   // 32: d, m, fifth bits, 4-bit q;                        value = d q + m
  q4_k,   // 256: d, m, 8 pairs of 6-bit (s, n), 4-bit q;          value = (d s) q - m n
  q5_k,   // 256: d, m, 8 pairs of 6-bit (s, n), fifth bits, 4-bit q; value = (d s) q - m n
  q6_k,   // 256: 4-bit q, bits five and six, 16 int8 s, d;        value = (d s) (q - 32)
  mxfp4,  // 32: a power of two d, 4-bit floats e2m1;              value = d e2m1
};

inline constexpr int kDTypes = 19;  // all of the above

/// What a block is called and how large it is. Plain types have blocks of one element.
struct DTypeTraits {
  std::string_view name;        // lower case, as used in messages and JSON: "f32", "bf16", "q4_1", ...
  std::int64_t block_elements;  // that share one block
  std::int64_t block_bytes;
};

constexpr DTypeTraits traits(DType dtype) {
  constexpr DTypeTraits kTraits[kDTypes] = {
      {"f64", 1, 8},      {"f32", 1, 4},      {"f16", 1, 2},      {"bf16", 1, 2},   {"i64", 1, 8},
      {"i32", 1, 4},      {"i16", 1, 2},      {"i8", 1, 1},       {"u8", 1, 1},     {"f8_e4m3", 1, 1},
      {"q8_0", 32, 34},   {"q4_0", 32, 18},   {"q4_1", 32, 20},   {"q5_0", 32, 22}, {"q5_1", 32, 24},
      {"q4_k", 256, 144}, {"q5_k", 256, 176}, {"q6_k", 256, 210}, {"mxfp4", 32, 17}};
  return kTraits[static_cast<int>(dtype)];
}

constexpr std::string_view name(DType dtype) {
  return traits(dtype).name;
}
constexpr std::int64_t block_elements(DType dtype) {
  return traits(dtype).block_elements;
}
constexpr std::int64_t block_bytes(DType dtype) {
  return traits(dtype).block_bytes;
}
constexpr bool is_quantised(DType dtype) {
  return block_elements(dtype) > 1;
}

/// The value of an f8_e4m3 byte.
constexpr float f8_e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 8) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  return sign != 0 ? -subnormal : subnormal;
}

/// bfloat16 storage. Arithmetic happens in float; conversion rounds to nearest even and keeps NaN.
struct bf16 {
  std::uint16_t bits;
};

/// IEEE binary16 storage. Arithmetic happens in float; conversion rounds to nearest even and keeps NaN.
struct f16 {
  std::uint16_t bits;
};

constexpr float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

constexpr bf16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};  // quiet NaN
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

constexpr float to_float(f16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal: exact in float
  return sign ? -magnitude : magnitude;
}

constexpr f16 to_f16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // rounds beyond 65504
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 aligns the value so that the FPU rounds at 2^-24
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace basin
