// The front door: check the problem, choose an implementation, run it, and say which one ran.
#pragma once

#include <string_view>

#include "basin/attention/spec.h"
#include "basin/base/thread_pool.h"

namespace basin::attention {

enum class Backend {
  automatic,  // cpu where `support` allows it, else reference
  reference,  // double precision, plain loops, every feature
  cpu,        // SIMD, chosen by cpuid or BASIN_CPU
};

/// What actually ran, for reports and tests. Static strings.
struct Ran {
  std::string_view backend;  // "reference" or "cpu"
  std::string_view target;   // "double", or "amx", "avx512_bf16", "avx2", "generic"
};

/// Runs attention forward. Throws Error(invalid_argument) for shapes, dtypes, strides or lengths that
/// contradict each other and Error(unsupported) when the chosen backend lacks the feature; nothing has been
/// written then.
Ran forward(const Forward& problem, Backend backend, ThreadPool& pool);

/// Runs attention backward, by the rules of `forward`. The reference takes any dtype, with maths in double.
Ran backward(const Backward& problem, Backend backend, ThreadPool& pool);

}  // namespace basin::attention
