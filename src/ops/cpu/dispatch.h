// The kernel of the target this process runs.
#pragma once

#include "basin/base/cpu_target.h"
#include "ops/cpu/kernel.h"

namespace basin::ops::cpu {

inline const Kernel& kernel() {
  static const Kernel chosen = [] {
    switch (cpu_target()) {
#if defined(__x86_64__)
      case CpuTarget::avx512_bf16:
        return avx512_bf16::kernel();
      case CpuTarget::avx2:
        return avx2::kernel();
#endif
      default:
        return generic::kernel();
    }
  }();
  return chosen;
}

}  // namespace basin::ops::cpu
