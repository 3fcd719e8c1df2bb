#include "basin/attention/attention.h"

#include "basin/attention/cpu.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"

namespace basin::attention {

Ran forward(const Forward& problem, Backend backend, ThreadPool& pool) {
  check(problem);
  if (backend == Backend::automatic) {
    backend = unsupported_reason(problem, Backend::cpu).empty() ? Backend::cpu : Backend::reference;
  }
  require_supported(problem, backend);
  if (backend == Backend::reference) {
    reference::forward(problem);
    return {"reference", "double"};
  }
  cpu::forward(problem, pool);
  return {"cpu", cpu::target_name()};
}

Ran backward(const Backward& problem, Backend backend, ThreadPool& pool) {
  check(problem);
  if (backend == Backend::automatic) {
    backend = unsupported_reason(problem, Backend::cpu).empty() ? Backend::cpu : Backend::reference;
  }
  require_supported(problem, backend);
  if (backend == Backend::reference) {
    reference::backward(problem);
    return {"reference", "double"};
  }
  cpu::backward(problem, pool);
  return {"cpu", cpu::target_name()};
}

}  // namespace basin::attention
