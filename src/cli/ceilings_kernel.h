// Loops that do nothing but load, or nothing but multiply and add: what this machine can reach at most.
#pragma once

#include <cstdint>

#include "base/kernel_words.h"

namespace basin::cli {

/// One loop without memory traffic. Its result must be used, or the compiler removes it.
struct PeakLoop {
  float (*run)(std::int64_t iterations) = nullptr;  // null when the target has no such instruction
  std::int64_t operations = 0;                      // multiplications and additions of one iteration
};

struct CeilingKernels {
  float (*read)(const float* data, std::int64_t count) = nullptr;  // sums data[count], count % 64 == 0
  PeakLoop fp32_fma;
  PeakLoop bf16_dot;
  PeakLoop int8_dot;
};

CeilingKernels ceiling_kernels(generic::Target);
CeilingKernels ceiling_kernels(avx2::Target);
CeilingKernels ceiling_kernels(avx512_bf16::Target);

}  // namespace basin::cli
