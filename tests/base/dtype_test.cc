#include "basin/base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#if defined(__F16C__) || defined(__x86_64__)
#include <immintrin.h>
#endif

namespace basin {
namespace {

// What binary16 means, in double: exact for every pattern.
double f16_by_definition(std::uint16_t bits) {
  const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

TEST(DType, F16EveryPatternReadsByDefinition) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double want = f16_by_definition(static_cast<std::uint16_t>(bits));
    const float got = to_float(f16{static_cast<std::uint16_t>(bits)});
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(got), want) << bits;
      ASSERT_EQ(std::signbit(got), (bits & 0x8000u) != 0) << bits;
    }
  }
}

TEST(DType, F16EveryPatternSurvivesARoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const f16 x{static_cast<std::uint16_t>(bits)};
    const f16 back = to_f16(to_float(x));
    if ((bits & 0x7fffu) > 0x7c00u) {
      ASSERT_GT(back.bits & 0x7fffu, 0x7c00u) << bits;
    } else {
      ASSERT_EQ(back.bits, x.bits) << bits;
    }
  }
}

TEST(DType, F16HalfwayGoesToEvenAndNeighboursGoToTheNearest) {
  for (std::uint32_t low = 0; low < 0x7bff; ++low) {
    const double a = f16_by_definition(static_cast<std::uint16_t>(low));
    const double b = f16_by_definition(static_cast<std::uint16_t>(low + 1));
    const float middle = static_cast<float>((a + b) / 2);  // exact: 12 significant bits
    const std::uint32_t even = low % 2 == 0 ? low : low + 1;
    ASSERT_EQ(to_f16(middle).bits, even) << low;
    ASSERT_EQ(to_f16(-middle).bits, even | 0x8000u) << low;
    ASSERT_EQ(to_f16(std::nextafter(middle, 0.0f)).bits, low) << low;
    ASSERT_EQ(to_f16(std::nextafter(middle, 1e9f)).bits, low + 1) << low;
  }
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::infinity()).bits, 0x7c00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) std::uint16_t hardware_f16(float x) {
  return static_cast<std::uint16_t>(
      _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0));
}

TEST(DType, F16EqualsTheHardwareConversion) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this CPU has no F16C";
  // Every exponent and sign with fraction bits on both sides of each rounding boundary: 2^32 / 257 patterns.
  for (std::uint64_t u = 0; u <= 0xffffffffu; u += 257) {
    float x;
    const auto bits = static_cast<std::uint32_t>(u);
    std::memcpy(&x, &bits, sizeof x);
    if (std::isnan(x)) {
      ASSERT_GT(to_f16(x).bits & 0x7fffu, 0x7c00u);
    } else {
      ASSERT_EQ(to_f16(x).bits, hardware_f16(x)) << x;
    }
  }
}
#endif

TEST(DType, Bf16RoundsToNearestEven) {
  for (std::uint32_t high = 0; high < 0x7f80; ++high) {
    const auto at = [&](std::uint32_t low) { return std::bit_cast<float>(high << 16 | low); };
    ASSERT_EQ(to_bf16(at(0)).bits, high);
    ASSERT_EQ(to_float(bf16{static_cast<std::uint16_t>(high)}), at(0));
    ASSERT_EQ(to_bf16(at(0x7fff)).bits, high);
    ASSERT_EQ(to_bf16(at(0x8000)).bits, high + high % 2) << high;
    ASSERT_EQ(to_bf16(at(0x8001)).bits, high + 1);
    ASSERT_EQ(to_bf16(-at(0x8001)).bits, (high + 1) | 0x8000u);
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
}

TEST(DType, Bf16KeepsEveryNan) {
  for (std::uint32_t u = 0x7f800001u; u < 0x80000000u - 65521u; u += 65521) {
    EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(u)))));
    EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(u | 0x80000000u)))));
  }
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7fffffffu)))));
}

TEST(DType, BlocksAndNames) {
  EXPECT_EQ(block_bytes(DType::q8_0), 2 + 32);
  EXPECT_EQ(block_bytes(DType::q4_1), 2 + 2 + 16);
  EXPECT_EQ(block_elements(DType::q4_1), 32);
  EXPECT_EQ(block_elements(DType::bf16), 1);
  EXPECT_EQ(name(DType::bf16), "bf16");
  EXPECT_EQ(name(DType::q4_1), "q4_1");
  EXPECT_TRUE(is_quantised(DType::q8_0));
  EXPECT_FALSE(is_quantised(DType::f16));
  EXPECT_EQ(block_bytes(DType::mxfp4), 1 + 16);
  EXPECT_EQ(block_bytes(DType::q4_k), 2 + 2 + 12 + 128);
  EXPECT_EQ(block_bytes(DType::q5_k), 2 + 2 + 12 + 32 + 128);
  EXPECT_EQ(block_bytes(DType::q6_k), 128 + 64 + 16 + 2);
  EXPECT_EQ(block_elements(DType::q6_k), 256);
  EXPECT_EQ(name(DType::mxfp4), "mxfp4");  // the last one: the table has no gap
  EXPECT_EQ(name(DType::f8_e4m3), "f8_e4m3");
}

// What OCP's E4M3 means, in double.
TEST(DType, F8EveryPatternReadsByDefinition) {
  for (int bits = 0; bits < 256; ++bits) {
    const double sign = bits >= 128 ? -1 : 1;
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float got = f8_e4m3_to_float(static_cast<std::uint8_t>(bits));
    if (exponent == 15 && fraction == 7) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      continue;
    }
    const double want = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    EXPECT_EQ(static_cast<double>(got), sign * want) << bits;
    EXPECT_EQ(std::signbit(got), bits >= 128) << bits;
  }
}

}  // namespace
}  // namespace basin
