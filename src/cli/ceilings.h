// This machine's ceilings, measured: how fast it can read memory and multiply, on the threads of a pool.
#pragma once

#include <optional>

#include "basin/base/thread_pool.h"

namespace basin::cli {

struct Ceilings {
  double read_bytes_per_second = 0.0;  // from a buffer far beyond the last-level cache
  double fp32_flops = 0.0;             // multiplications and additions per second
  std::optional<double> bf16_flops;    // absent: this CPU target has no such instruction
  std::optional<double> int8_ops;
};

/// About two seconds. Throws Error(cancelled) after a signal.
Ceilings measure_ceilings(ThreadPool& pool);

}  // namespace basin::cli
