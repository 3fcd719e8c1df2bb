// The order of every sum, spelled out in scalar code and compared bit for bit. Each target must match it, so avx2 and
// avx512_bf16 give the same bits, but for bf16 weights in fast products.
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

// Where in 64 elements the unpacked element i lies: in place, or, in formats whose byte i holds the elements i and i + 16 of
// a block, the low halves of both blocks, then the high ones.
std::size_t stored(DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::q4_0:
    case DType::q4_1:
    case DType::q5_0:
    case DType::q5_1:
    case DType::mxfp4:
      return i % 16 + i / 16 % 2 * 32 + i / 32 * 16;
    default:
      return i;
  }
}

bool has_min(DType dtype) {
  return dtype == DType::q4_1 || dtype == DType::q5_1 || dtype == DType::q4_k || dtype == DType::q5_k;
}

// int8: of each 64 elements a lane takes four, in unpacked order. Their exact dot, times d_w d_a rounded once, joins the lane
// by a fused product; m of block b times the scaled sum of the activations joins the lane b mod 16 of the offsets.
float int8_product(DType dtype, const Element* row, std::size_t inputs, const float* x) {
  Lanes sum{}, offsets{};
  std::vector<Block> blocks;
  for (std::size_t b = 0; b < inputs / 32; ++b) {
    blocks.push_back(quantise(x + 32 * b));
    float& to = offsets[b % 16];
    if (has_min(dtype)) to = joined(row[32 * b].m, blocks[b].scaled_sum, to);
  }
  for (std::size_t group = 0; group < inputs; group += 64) {
    for (std::size_t lane = 0; lane < 16; ++lane) {
      int dot = 0;
      float d_w = 0, d_a = 0;
      for (std::size_t i = 4 * lane; i < 4 * lane + 4; ++i) {
        const std::size_t at = group + stored(dtype, i);
        if (at >= inputs) continue;  // the second of two blocks that is not there
        dot += row[at].q * blocks[at / 32].q[at % 32];
        d_w = row[at].d;
        d_a = blocks[at / 32].d;
      }
      sum[lane] = joined(static_cast<float>(dot), d_w * d_a, sum[lane]);
    }
  }
  return has_min(dtype) ? fold(sum) + fold(offsets) : fold(sum);
}

class LinearOrder : public KernelTest {};

TEST_F(LinearOrder, EqualsTheScalarSpellingBitForBit) {
  ThreadPool pool(2);
  constexpr std::int64_t kOutputs = 11, kTokens = 7;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t at_least :
         {32, 64, 96, 544, 1536}) {  // odd and even numbers of blocks, more than 16
      const std::int64_t inputs = whole_blocks(dtype, at_least);
      const Weights weights(dtype, kOutputs, inputs, static_cast<std::uint64_t>(inputs));
      const auto x = random_floats(kTokens * inputs, 2);
      for (const Compute compute : {Compute::fp32, Compute::fast}) {
        // VDPBF16PS rounds in a way of its own.
        if (compute == Compute::fast && dtype == DType::bf16 && cpu_target() == CpuTarget::avx512_bf16)
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
