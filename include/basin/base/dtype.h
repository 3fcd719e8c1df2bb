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
  q8_0,  // GGUF block of 32: f16 scale d, 32 int8 q;         value = d q
  q4_1,  // GGUF block of 32: f16 d, f16 m, 32 4-bit q;       value = d q + m
};

/// Elements that share one block: 1 for plain types, 32 for q8_0 and q4_1.
constexpr std::int64_t block_elements(DType dtype) {
  return dtype == DType::q8_0 || dtype == DType::q4_1 ? 32 : 1;
}

/// Bytes of one block (of one element for plain types).
constexpr std::int64_t block_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
      return 2;
    case DType::i8:
    case DType::u8:
      return 1;
    case DType::q8_0:
      return 34;
    case DType::q4_1:
      return 20;
  }
  return 0;
}

constexpr bool is_quantised(DType dtype) {
  return block_elements(dtype) > 1;
}

/// Lower-case name as used in messages and JSON: "f32", "bf16", "q4_1", ...
std::string_view name(DType dtype);

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
