#include "basin/attention/attention.h"

#include "basin/attention/cpu.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"
#include "basin/base/error.h"

namespace basin::attention {

Ran forward(const Forward& problem, Backend backend, ThreadPool& pool) {
  check(problem);
  if (backend == Backend::automatic) {
    backend = unsupported_reason(problem, Backend::cpu).empty() ? Backend::cpu : Backend::reference;
  }
  if (const std::string reason = unsupported_reason(problem, backend); !reason.empty()) {
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
  }
  if (backend == Backend::reference) {
    reference::forward(problem);
    return {"reference", "double"};
  }
  cpu::forward(problem, pool);
  return {"cpu", cpu::target_name()};
}

Ran backward(const Backward& problem, Backend backend, ThreadPool&) {
  check(problem);
  if (backend == Backend::cpu) {
    throw Error(ErrorCode::unsupported, "the cpu backend has no backward pass", "use the reference backend");
  }
  reference::backward(problem);
  return {"reference", "double"};
}

}  // namespace basin::attention
