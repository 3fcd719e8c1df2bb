// q4_k and q5_k: each part of 32 covers [min(0, least), largest] in equal steps. The block's factors are f16, such that the widest
// part has the scale 63; the parts' scales are rounded to 6 bits, and only then the elements are rounded, so that they make up for
// it. q6_k: each part of 16 covers -largest .. largest, scales of 8 bits with a sign, such that the largest lies at -32.
#include "weights/quantise_k.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "basin/base/dtype.h"

namespace basin::weights {
namespace {

void put_half(std::byte* to, f16 value) {
  std::memcpy(to, &value, 2);
}

int rounded(float x, int low, int high) {
  return std::isfinite(x)
             ? std::clamp(static_cast<int>(std::nearbyint(std::clamp(x, -1e6f, 1e6f))), low, high)
             : low;
}

// The least f16 that is at least x >= 0, so that nothing lies beyond the largest scale.
f16 half_above(float x) {
  f16 h = to_f16(x);
  if (to_float(h) < x && h.bits < 0x7bff) ++h.bits;
  return h;
}

// Eight parts with a 6-bit scale and a 6-bit minimum each.
struct Parts {
  f16 d, m;
  std::array<int, 8> scale, minimum;
  std::array<int, 256> q;
};

Parts eight_parts(const float* x, int most) {
  Parts parts{};
  std::array<float, 8> step, offset;
  for (std::size_t p = 0; p < 8; ++p) {
    const auto [low, high] = std::minmax_element(x + 32 * p, x + 32 * p + 32);
    offset[p] = std::max(0.0f, -*low);
    step[p] = std::max(0.0f, (*high + offset[p]) / static_cast<float>(most));
  }
  parts.d = half_above(*std::max_element(step.begin(), step.end()) / 63.0f);
  parts.m = half_above(*std::max_element(offset.begin(), offset.end()) / 63.0f);
  const float d = to_float(parts.d), m = to_float(parts.m);
  for (std::size_t p = 0; p < 8; ++p) {
    parts.scale[p] = d > 0 ? rounded(step[p] / d, 0, 63) : 0;
    parts.minimum[p] = m > 0 ? rounded(offset[p] / m, 0, 63) : 0;
    const float each = d * static_cast<float>(parts.scale[p]);
    const float from = m * static_cast<float>(parts.minimum[p]);
    for (std::size_t i = 32 * p; i < 32 * p + 32; ++i)
      parts.q[i] = each > 0 ? rounded((x[i] + from) / each, 0, most) : 0;
  }
  return parts;
}

// d, m, and the eight pairs in 12 bytes: the lower four plain, the upper bits of the others above them.
void put_factors(const Parts& parts, std::byte* out) {
  put_half(out, parts.d);
  put_half(out + 2, parts.m);
  for (std::size_t p = 0; p < 4; ++p) {
    const int s = parts.scale[p + 4], n = parts.minimum[p + 4];
    out[4 + p] = static_cast<std::byte>(parts.scale[p] | (s >> 4) << 6);
    out[8 + p] = static_cast<std::byte>(parts.minimum[p] | (n >> 4) << 6);
    out[12 + p] = static_cast<std::byte>((s & 15) | (n & 15) << 4);
  }
}

// Byte i of each 32 holds the elements i and i + 32 of 64.
void put_nibbles(const std::array<int, 256>& q, std::byte* out) {
  for (std::size_t i = 0; i < 128; ++i) {
    const std::size_t at = i / 32 * 64 + i % 32;
    out[i] = static_cast<std::byte>((q[at] & 15) | (q[at + 32] & 15) << 4);
  }
}

}  // namespace

void quantise_q4_k(const float* x, std::byte* out) {
  const Parts parts = eight_parts(x, 15);
  put_factors(parts, out);
  put_nibbles(parts.q, out + 16);
}

void quantise_q5_k(const float* x, std::byte* out) {
  const Parts parts = eight_parts(x, 31);
  put_factors(parts, out);
  for (std::size_t i = 0; i < 32; ++i) {
    int bits = 0;
    for (std::size_t p = 0; p < 8; ++p) bits |= (parts.q[32 * p + i] >> 4) << p;
    out[16 + i] = static_cast<std::byte>(bits);
  }
  put_nibbles(parts.q, out + 48);
}

void quantise_q6_k(const float* x, std::byte* out) {
  std::array<float, 16> step;
  float widest = 0;
  for (std::size_t p = 0; p < 16; ++p) {
    float largest = 0;
    for (std::size_t i = 16 * p; i < 16 * p + 16; ++i) {
      if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
    }
    step[p] = largest / -32.0f;
    widest = std::max(widest, std::fabs(step[p]));
  }
  const f16 half = half_above(widest / 127.0f);
  const float d = to_float(half);
  std::array<int, 256> q;
  for (std::size_t p = 0; p < 16; ++p) {
    const int scale = d > 0 ? rounded(step[p] / d, -127, 127) : 0;
    out[192 + p] = static_cast<std::byte>(scale & 0xff);
    const float each = d * static_cast<float>(scale);
    for (std::size_t i = 16 * p; i < 16 * p + 16; ++i)
      q[i] = (each != 0 ? rounded(x[i] / each, -32, 31) : 0) + 32;
  }
  // Of each 128: low nibbles are the first 64, high ones the others; two upper bits of the elements i, i + 32, ... in byte i.
  for (std::size_t half_block = 0; half_block < 2; ++half_block) {
    const int* from = q.data() + 128 * half_block;
    for (std::size_t i = 0; i < 64; ++i)
      out[64 * half_block + i] = static_cast<std::byte>((from[i] & 15) | (from[i + 64] & 15) << 4);
    for (std::size_t i = 0; i < 32; ++i) {
      int bits = 0;
      for (std::size_t n = 0; n < 4; ++n) bits |= (from[32 * n + i] >> 4) << (2 * n);
      out[128 + 32 * half_block + i] = static_cast<std::byte>(bits);
    }
  }
  put_half(out + 208, half);
}

}  // namespace basin::weights
