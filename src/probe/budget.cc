// The effective budget: how many keys hold a share of the mass.
#include "base/choose_kernels.h"
#include "base/scratch_buffer.h"
#include "probe/cpu/kernel.h"
#include "probe/layer.h"

namespace basin::probe {

const cpu::Kernel& cpu::kernel() {
  static const Kernel chosen = choose_kernels([](auto target) { return kernel(target); });
  return chosen;
}

std::array<std::int64_t, 3> budgets(float* weights, std::int64_t count, double mass) {
  thread_local ScratchBuffer<float> scratch;
  std::array<double, kBudgetShares.size()> least{};
  for (std::size_t i = 0; i < least.size(); ++i) least[i] = kBudgetShares[i] * mass;
  std::array<std::int64_t, kBudgetShares.size()> counts{};
  cpu::kernel().count_budgets(weights, count, least.data(), static_cast<int>(least.size()), counts.data(),
                              scratch.at_least(static_cast<std::size_t>(count + kLanes)));
  return counts;
}

}  // namespace basin::probe
