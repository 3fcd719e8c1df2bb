#include "ops/weights.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "basin/base/cpu_target.h"

namespace basin::ops::tests {
namespace {

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

float half_at(const std::byte* p) {
  f16 x;
  std::memcpy(&x, p, 2);
  return to_float(x);
}

int byte_at(const std::byte* p) {
  return std::to_integer<int>(*p);
}

int int8_at(const std::byte* p) {
  return static_cast<std::int8_t>(byte_at(p));
}

// The low nibbles of 16 bytes are the first 16 elements, the high ones the others.
int nibble(const std::byte* p, int i) {
  return i < 16 ? byte_at(p + i) & 15 : byte_at(p + i - 16) >> 4;
}

int bit(const std::byte* p, int i) {
  return byte_at(p + i / 8) >> (i % 8) & 1;
}

// Pair i of eight: six bits each, the first four plain, the upper bits of the others in the two top bits of the first.
std::pair<int, int> pair_at(const std::byte* p, int i) {
  if (i < 4) return {byte_at(p + i) & 63, byte_at(p + i + 4) & 63};
  return {(byte_at(p + i + 4) & 15) | (byte_at(p + i - 4) >> 6) << 4,
          byte_at(p + i + 4) >> 4 | (byte_at(p + i) >> 6) << 4};
}

Element with_pair(const std::byte* block, int i, int q) {
  const auto [s, n] = pair_at(block + 4, i / 32);
  return {q, half_at(block) * static_cast<float>(s), -(half_at(block + 2) * static_cast<float>(n))};
}

double plain_value(DType dtype, const std::byte* p) {
  if (dtype == DType::f16) return static_cast<double>(half_at(p));
  float x;
  if (dtype == DType::f32) {
    std::memcpy(&x, p, 4);
  } else {
    bf16 half;
    std::memcpy(&half, p, 2);
    x = to_float(half);
  }
  return static_cast<double>(x);
}

// Fills one block: plain types with a normal number; quantised ones with any bytes but for moderate factors.
void random_block(DType dtype, std::mt19937_64& random, std::byte* to) {
  std::normal_distribution<float> normal;
  if (dtype == DType::f32) return put(to, normal(random));
  if (dtype == DType::f16) return put(to, to_f16(normal(random)));
  if (dtype == DType::bf16) return put(to, to_bf16(normal(random)));
  for (std::int64_t i = 0; i < block_bytes(dtype); ++i) to[i] = static_cast<std::byte>(random() & 0xff);
  const f16 d = to_f16(0.02f * normal(random));  // either sign
  if (dtype == DType::mxfp4) return put(to, static_cast<std::uint8_t>(118 + random() % 8));
  if (dtype == DType::q6_k) return put(to + 208, d);
  put(to, d);
  if (dtype == DType::q4_1 || dtype == DType::q5_1) put(to + 2, to_f16(normal(random)));
  if (dtype == DType::q4_k || dtype == DType::q5_k) put(to + 2, to_f16(0.05f * normal(random)));
}

}  // namespace

Element element(DType dtype, const std::byte* block, int i) {
  switch (dtype) {
    case DType::q8_0:
      return {int8_at(block + 2 + i), half_at(block), 0.0f};
    case DType::q4_0:
      return {nibble(block + 2, i) - 8, half_at(block), 0.0f};
    case DType::q4_1:
      return {nibble(block + 4, i), half_at(block), half_at(block + 2)};
    case DType::q5_0:
      return {(nibble(block + 6, i) | bit(block + 2, i) << 4) - 16, half_at(block), 0.0f};
    case DType::q5_1:
      return {nibble(block + 8, i) | bit(block + 4, i) << 4, half_at(block), half_at(block + 2)};
    case DType::q4_k: {
      const int byte = byte_at(block + 16 + i / 64 * 32 + i % 32);
      return with_pair(block, i, i % 64 < 32 ? byte & 15 : byte >> 4);
    }
    case DType::q5_k: {
      const int byte = byte_at(block + 48 + i / 64 * 32 + i % 32);
      const int fifth = byte_at(block + 16 + i % 32) >> (i / 32) & 1;
      return with_pair(block, i, (i % 64 < 32 ? byte & 15 : byte >> 4) | fifth << 4);
    }
    case DType::q6_k: {
      const int byte = byte_at(block + i / 128 * 64 + i % 64);
      const int high = byte_at(block + 128 + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3;
      const int q = (i % 128 < 64 ? byte & 15 : byte >> 4) | high << 4;
      return {q - 32, half_at(block + 208) * static_cast<float>(int8_at(block + 192 + i / 16)), 0.0f};
    }
    case DType::mxfp4: {
      constexpr int kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12};
      const int code = nibble(block + 1, i);
      return {code < 8 ? kTwice[code] : -kTwice[code - 8], std::ldexp(1.0f, byte_at(block) - 128), 0.0f};
    }
    default:
      throw std::logic_error("no quantised dtype");
  }
}

Weights::Weights(DType dtype, std::int64_t outputs, std::int64_t inputs, std::uint64_t seed) {
  matrix = {nullptr, dtype, outputs, inputs};
  bytes.resize(static_cast<std::size_t>(outputs * matrix.row_bytes() + 1));
  values.resize(static_cast<std::size_t>(outputs * inputs));
  matrix.data = bytes.data() + 1;
  std::mt19937_64 random(seed);
  std::byte* to = bytes.data() + 1;
  for (std::size_t i = 0; i < values.size(); i += static_cast<std::size_t>(block_elements(dtype))) {
    random_block(dtype, random, to);
    if (!is_quantised(dtype)) {
      values[i] = plain_value(dtype, to);
    } else {
      for (int n = 0; n < block_elements(dtype); ++n) {
        const Element& e = elements.emplace_back(element(dtype, to, n));
        values[i + static_cast<std::size_t>(n)] = static_cast<double>(e.d) * e.q + static_cast<double>(e.m);
      }
    }
    to += block_bytes(dtype);
  }
}

std::vector<float> random_floats(std::int64_t count, std::uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<float> multiply(const std::vector<float>& x, std::int64_t tokens, const WeightMatrix& weight,
                            Compute compute, ThreadPool& pool) {
  std::vector<float> y(static_cast<std::size_t>(tokens * weight.outputs));
  const LinearOutput output{&weight, nullptr, y.data(), weight.outputs};
  linear(x.data(), weight.inputs, tokens, {&output, 1}, compute, pool);
  return y;
}

void KernelTest::SetUp() {
  const char* forced = std::getenv("BASIN_CPU");
  ASSERT_NE(forced, nullptr) << "these tests need BASIN_CPU=generic, avx2, avx512_bf16 or amx; ctest sets it";
  for (const CpuTarget target : kCpuTargets) {
    if (name(target) == forced && !runs_here(target))
      GTEST_SKIP() << "this CPU cannot run the target " << forced;
  }
  ASSERT_EQ(name(cpu_target()), forced);
}

}  // namespace basin::ops::tests
