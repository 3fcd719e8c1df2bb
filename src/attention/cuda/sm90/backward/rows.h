// The kernels of backward that work on rows alone (rows.cu).
#pragma once

namespace basin::attention::sm90 {

struct RowKernels {
  const void* row_sums = nullptr;  // grid (row_blocks, h_q)
  const void* dsink = nullptr;     // grid h_q
  int threads = 0;
};

/// Of bf16 or f16 tensors.
RowKernels row_kernels(bool bf16);

}  // namespace basin::attention::sm90
