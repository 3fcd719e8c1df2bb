#include "base/choose_kernels.h"
#include "ops/cpu/kernel.h"

namespace basin::ops::cpu {

const Kernel& kernel() {
  static const Kernel chosen = choose_kernels([](auto target) { return kernel(target); });
  return chosen;
}

}  // namespace basin::ops::cpu
