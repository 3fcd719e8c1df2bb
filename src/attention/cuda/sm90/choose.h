// Which kernel runs a problem, with what launch shape. Pure host functions of upper bounds, tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "basin/base/dtype.h"

namespace basin::attention::sm90 {

struct Shape {
  DType dtype = DType::bf16;
  std::int64_t batch = 0;
  std::int64_t h_q = 0;
  std::int64_t h_kv = 0;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  std::int64_t max_q_tokens = 0;
  std::int64_t max_kv_tokens = 0;
  bool softcap = false;
};

enum class Path { prefill, decode };

struct Plan {
  Path path = Path::prefill;
  int d_qk = 0;  // of the instance; at least the problem's
  int d_v = 0;
  int rows = 0;           // query rows of a CTA
  int ctas = 0;           // grid, at most
  std::int64_t segments = 0;      // decode: of one row, at most
  std::size_t counter_bytes = 0;  // the part of the workspace that starts as zero
  std::size_t workspace_bytes = 0;
};

/// The plan for a supported shape on a device with `multiprocessors` SMs.
Plan plan(const Shape& shape, int multiprocessors);

}  // namespace basin::attention::sm90
