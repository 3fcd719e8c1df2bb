// The kernels of the target that this process runs, for host code.
#pragma once

#include "base/kernel_words.h"
#include "basin/base/cpu_target.h"

namespace basin {

/// make(T) for the T of cpu_target(): generic::Target, avx2::Target, avx512_bf16::Target or amx::Target.
template <typename Make>
auto choose_kernels(const Make& make) {
  switch (cpu_target()) {
#if defined(__x86_64__)
    case CpuTarget::amx:
      return make(amx::Target());
    case CpuTarget::avx512_bf16:
      return make(avx512_bf16::Target());
    case CpuTarget::avx2:
      return make(avx2::Target());
#endif
    default:  // cpu_target() names no target that was not compiled
      return make(generic::Target());
  }
}

}  // namespace basin
