// Blocks of 32 as ggml's reference quantisers write them: the same operations in float, in the same order.
#include "weights/quantise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "weights/quantise_k.h"

namespace basin::weights {
namespace {

constexpr int kBlock = 32;

// Appends the fields of a block.
class Fields {
 public:
  explicit Fields(std::byte* to) : to_(to) {}
  void half(float x) {
    const f16 value = to_f16(x);
    std::memcpy(to_, &value, 2);
    to_ += 2;
  }
  void byte(int value) { *to_++ = static_cast<std::byte>(value); }

 private:
  std::byte* to_;
};

float inverse(float d) {
  const float i = 1.0f / d;
  return std::isfinite(i) ? i : 0.0f;  // d is zero, or too small for the f16 that is stored
}

// The value of largest magnitude, the first of several.
float signed_largest(const float* x) {
  float largest = x[0];
  for (int i = 1; i < kBlock; ++i) {
    if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
  }
  return largest;
}

void nibbles(Fields& fields, const std::array<int, kBlock>& q) {
  for (std::size_t i = 0; i < 16; ++i) fields.byte((q[i] & 15) | (q[i + 16] & 15) << 4);
}

void fifth_bits(Fields& fields, const std::array<int, kBlock>& q) {
  for (std::size_t byte = 0; byte < 4; ++byte) {
    int bits = 0;
    for (std::size_t i = 0; i < 8; ++i) bits |= (q[8 * byte + i] >> 4) << i;
    fields.byte(bits);
  }
}

// q in 0 .. 2 kMiddle - 1, value d (q - kMiddle), the largest at q = 0.
template <int kMiddle>
void symmetric(const float* x, std::byte* out) {
  const float d = signed_largest(x) / static_cast<float>(-kMiddle);
  const float id = inverse(d);
  std::array<int, kBlock> q;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const float shifted = x[i] * id + (static_cast<float>(kMiddle) + 0.5f);
    q[i] = std::min(static_cast<int>(shifted), 2 * kMiddle - 1);
  }
  Fields fields(out);
  fields.half(d);
  if (kMiddle == 16) fifth_bits(fields, q);
  nibbles(fields, q);
}

// q in 0 .. kMost, value d q + m, from the least to the largest.
template <int kMost>
void with_minimum(const float* x, std::byte* out) {
  const auto [low, high] = std::minmax_element(x, x + kBlock);
  const float d = (*high - *low) / static_cast<float>(kMost);
  const float id = inverse(d);
  std::array<int, kBlock> q;
  for (std::size_t i = 0; i < kBlock; ++i)
    q[i] = std::min(static_cast<int>((x[i] - *low) * id + 0.5f), kMost);
  Fields fields(out);
  fields.half(d);
  fields.half(*low);
  if (kMost == 31) fifth_bits(fields, q);
  nibbles(fields, q);
}

void q8_0(const float* x, std::byte* out) {
  const float d = std::fabs(signed_largest(x)) / 127.0f;
  const float id = inverse(d);
  Fields fields(out);
  fields.half(d);
  for (int i = 0; i < kBlock; ++i) fields.byte(static_cast<int>(std::round(x[i] * id)) & 0xff);
}

void mxfp4(const float* x, std::byte* out) {
  constexpr std::array<float, 16> kTwice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const float largest = std::fabs(signed_largest(x));
  // 4 is the power of two of e2m1's largest, 6.
  const int e = largest > 0 ? std::max(0, static_cast<int>(std::floor(std::log2(largest))) - 2 + 127) : 0;
  const float half = std::ldexp(1.0f, e - 128);
  std::array<int, kBlock> q;
  for (std::size_t i = 0; i < kBlock; ++i) {
    float least = std::fabs(half * kTwice[0] - x[i]);
    q[i] = 0;
    for (std::size_t code = 1; code < kTwice.size(); ++code) {
      const float error = std::fabs(half * kTwice[code] - x[i]);
      if (error < least) {
        least = error;
        q[i] = static_cast<int>(code);
      }
    }
  }
  Fields fields(out);
  fields.byte(e);
  nibbles(fields, q);
}

using BlockWriter = void (*)(const float* x, std::byte* out);

BlockWriter block_writer(DType dtype) {
  switch (dtype) {
    case DType::q8_0:
      return q8_0;
    case DType::q4_0:
      return symmetric<8>;
    case DType::q4_1:
      return with_minimum<15>;
    case DType::q5_0:
      return symmetric<16>;
    case DType::q5_1:
      return with_minimum<31>;
    case DType::q4_k:
      return quantise_q4_k;
    case DType::q5_k:
      return quantise_q5_k;
    case DType::q6_k:
      return quantise_q6_k;
    case DType::mxfp4:
      return mxfp4;
    default:
      throw std::logic_error("weights are not written as this type");
  }
}

// The largest magnitude that the factors of a block can hold: those are f16, but for mxfp4's powers of two.
float most(DType dtype) {
  constexpr float kHalf = 65504.0f;
  switch (dtype) {
    case DType::f32:
      return std::numeric_limits<float>::max();
    case DType::bf16:
      return std::bit_cast<float>(0x7f7f7fffu);  // rounds to the largest
    case DType::f16:
      return std::bit_cast<float>(0x477fefffu);
    case DType::q8_0:
      return kHalf * 127.0f;
    case DType::q4_0:
      return kHalf * 8.0f;
    case DType::q5_0:
      return kHalf * 16.0f;
    case DType::mxfp4:
      return std::numeric_limits<float>::max();
    default:
      return kHalf;  // the minimum of a block, or a whole range
  }
}

}  // namespace

bool is_weight_type(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || is_quantised(dtype);
}

std::optional<std::int64_t> quantise_row(DType dtype, const float* x, std::int64_t count, std::byte* out) {
  const float limit = most(dtype);
  const bool has_infinity = !is_quantised(dtype);  // and NaN
  for (std::int64_t i = 0; i < count; ++i) {
    if (!(std::fabs(x[i]) <= limit) && !(has_infinity && !std::isfinite(x[i]))) return i;
  }
  if (dtype == DType::f32) {
    std::memcpy(out, x, static_cast<std::size_t>(count) * 4);
  } else if (dtype == DType::f16 || dtype == DType::bf16) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint16_t bits = dtype == DType::f16 ? to_f16(x[i]).bits : to_bf16(x[i]).bits;
      std::memcpy(out + 2 * i, &bits, 2);
    }
  } else {
    const BlockWriter write = block_writer(dtype);
    for (std::int64_t i = 0; i < count; i += block_elements(dtype), out += block_bytes(dtype))
      write(x + i, out);
  }
  return std::nullopt;
}

}  // namespace basin::weights
