// The kernels of backward that work on rows alone (rows.cu).
#pragma once

namespace basin::attention::sm90 {

struct RowKernels {
  const void* row_sums = nullptr;  // grid (row_blocks, h_q)
  const void* dsink = nullptr;     // grid h_q
  const void* dq = nullptr;        // grid (row_blocks * 2 * d_qk / 64, h_q)
  int threads = 0;
};

/// Of bf16 or f16 tensors, for an instance of head size d_qk (64 or 128 where dq has sums).
RowKernels row_kernels(bool bf16, int d_qk);

}  // namespace basin::attention::sm90
