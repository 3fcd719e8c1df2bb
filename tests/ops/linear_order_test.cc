// The order of every sum, spelled out in scalar code and compared bit for bit. Each target must match it, so all but generic
// give the same bits, but for bf16 weights in fast products.
#include <array>
#include <cmath>
#include <cstring>

#include "basin/base/cpu_target.h"
#include "ops/linear.h"
#include "ops/weights.h"

namespace basin::ops::tests {
namespace {

using Lanes = std::array<float, 16>;

// a b + c as the target does it: SSE2 has no fused form, and emulating one costs more than the product.
float joined(float a, float b, float c) {
#if defined(__x86_64__)
  static const bool fused = cpu_target() != CpuTarget::generic;
  if (!fused) return a * b + c;
#endif
  return std::fma(a, b, c);
}

float fold(Lanes x) {
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

// fp32: lane k mod 16 is one chain of fused products over ascending k.
float float_product(const std::vector<float>& weight, const float* x) {
  Lanes sum{};
  for (std::size_t k = 0; k < weight.size(); ++k) sum[k % 16] = joined(weight[k], x[k], sum[k % 16]);
  return fold(sum);
}

struct Block {
  float d;
  float scaled_sum;
  std::array<int, 32> q;
};

Block quantise(const float* x) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float inverse = 127.0f / largest;
  Block block{largest / 127.0f, 0, {}};
  int sum = 0;
  for (std::size_t i = 0; i < 32; ++i) sum += block.q[i] = static_cast<int>(std::nearbyint(x[i] * inverse));
  block.scaled_sum = block.d * static_cast<float>(sum);
  return block;
}

bool has_min(DType dtype) {
  return dtype == DType::q4_1 || dtype == DType::q5_1 || dtype == DType::q4_k || dtype == DType::q5_k;
}

// int8: one chain for each output. Of every block, the exact dot of the elements that share a scale (all 32, or 16) times
// d_w d_a, rounded once, joins by a fused product; then m times the scaled sum of the activations.
float int8_product(DType dtype, const Element* row, std::size_t inputs, const float* x) {
  const std::size_t scaled = dtype == DType::q6_k ? 16 : 32;
  float sum = 0;
  for (std::size_t begin = 0; begin < inputs; begin += 32) {
    const Block block = quantise(x + begin);
    for (std::size_t part = 0; part < 32; part += scaled) {
      int dot = 0;
      for (std::size_t i = part; i < part + scaled; ++i) dot += row[begin + i].q * block.q[i];
      sum = joined(static_cast<float>(dot), row[begin + part].d * block.d, sum);
    }
    if (has_min(dtype)) sum = joined(row[begin].m, block.scaled_sum, sum);
  }
  return sum;
}

class LinearOrder : public KernelTest {};

TEST_F(LinearOrder, EqualsTheScalarSpellingBitForBit) {
  ThreadPool pool(2);
  constexpr std::int64_t kOutputs = 35,
                         kTokens = 13;  // two groups of rows and a rest; more tokens than a tile
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t at_least :
         {32, 64, 96, 544, 1536}) {  // odd and even numbers of blocks, more than 16
      const std::int64_t inputs = whole_blocks(dtype, at_least);
      const Weights weights(dtype, kOutputs, inputs, static_cast<std::uint64_t>(inputs));
      const auto x = random_floats(kTokens * inputs, 2);
      for (const Compute compute : {Compute::fp32, Compute::fast}) {
        // VDPBF16PS rounds in a way of its own.
        if (compute == Compute::fast && dtype == DType::bf16 && cpu_target() >= CpuTarget::avx512_bf16)
          continue;
        const auto y = multiply(x, kTokens, weights.matrix, compute, pool);
        for (std::int64_t r = 0; r < kOutputs; ++r) {
          std::vector<float> wide(static_cast<std::size_t>(inputs));
          widen_row(weights.matrix, r, wide.data());
          for (std::int64_t t = 0; t < kTokens; ++t) {
            const float* token = x.data() + t * inputs;
            const float expected = compute == Compute::fast && is_quantised(dtype)
                                       ? int8_product(dtype, weights.elements.data() + r * inputs,
                                                      static_cast<std::size_t>(inputs), token)
                                       : float_product(wide, token);
            const float actual = y[static_cast<std::size_t>(t * kOutputs + r)];
            ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
                << name(dtype) << " inputs " << inputs << " t " << t << " r " << r << ": " << actual << " "
                << expected;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace basin::ops::tests
