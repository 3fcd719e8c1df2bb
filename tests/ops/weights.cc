#include "ops/weights.h"

#include <cstdlib>
#include <cstring>

#include "basin/base/cpu_target.h"

namespace basin::ops::tests {
namespace {

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Writes one block at `to` and its decoded values at `values`.
void random_block(DType dtype, std::mt19937_64& random, std::byte* to, double* values) {
  std::normal_distribution<float> normal;
  if (dtype == DType::f32) {
    const float x = normal(random);
    put(to, x);
    *values = static_cast<double>(x);
  } else if (dtype == DType::f16) {
    const f16 x = to_f16(normal(random));
    put(to, x);
    *values = static_cast<double>(to_float(x));
  } else if (dtype == DType::bf16) {
    const bf16 x = to_bf16(normal(random));
    put(to, x);
    *values = static_cast<double>(to_float(x));
  } else {
    const f16 d = to_f16(0.02f * normal(random));  // either sign
    put(to, d);
    if (dtype == DType::q8_0) {
      for (int i = 0; i < 32; ++i) {
        const auto q = static_cast<std::int8_t>(random() & 0xff);  // -128 included
        put(to + 2 + i, q);
        values[i] = static_cast<double>(to_float(d)) * q;
      }
      return;
    }
    const f16 m = to_f16(normal(random));
    put(to + 2, m);
    for (int i = 0; i < 16; ++i) {
      const auto byte = static_cast<std::uint8_t>(random() & 0xff);
      put(to + 4 + i, byte);
      values[i] = static_cast<double>(to_float(d)) * (byte & 15) + static_cast<double>(to_float(m));
      values[16 + i] = static_cast<double>(to_float(d)) * (byte >> 4) + static_cast<double>(to_float(m));
    }
  }
}

}  // namespace

Weights::Weights(DType dtype, std::int64_t outputs, std::int64_t inputs, std::uint64_t seed) {
  matrix = {nullptr, dtype, outputs, inputs};
  bytes.resize(static_cast<std::size_t>(outputs * matrix.row_bytes() + 1));
  values.resize(static_cast<std::size_t>(outputs * inputs));
  matrix.data = bytes.data() + 1;
  std::mt19937_64 random(seed);
  std::byte* to = bytes.data() + 1;
  for (std::size_t i = 0; i < values.size(); i += static_cast<std::size_t>(block_elements(dtype))) {
    random_block(dtype, random, to, values.data() + i);
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
  ASSERT_NE(forced, nullptr) << "these tests need BASIN_CPU=generic, avx2 or avx512_bf16; ctest sets it";
  for (const CpuTarget target : {CpuTarget::generic, CpuTarget::avx2, CpuTarget::avx512_bf16}) {
    if (name(target) == forced && !runs_here(target))
      GTEST_SKIP() << "this CPU cannot run the target " << forced;
  }
  ASSERT_EQ(name(cpu_target()), forced);
}

}  // namespace basin::ops::tests
