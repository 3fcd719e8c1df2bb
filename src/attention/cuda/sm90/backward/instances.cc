// The list of compiled kernels of the backward pass. A new file under instances/ gets its line here.
#include "attention/cuda/sm90/backward/instances.h"

struct __nv_bfloat16;  // what cuda_bf16.h and cuda_fp16.h define
struct __half;

namespace basin::attention::sm90 {
namespace {

template <typename T, int kDqk, int kDv, bool kCap>
BackwardInstances of_size(bool sums) {
  if constexpr (kDqk <= 128 && !kCap) {
    if (sums) return {backward_keys_instance<T, kDqk, kDv, kCap, true>(), {}, {}};
  }
  return {backward_keys_instance<T, kDqk, kDv, kCap, false>(), backward_fold_instance<T, kDqk, kDv>(),
          backward_queries_instance<T, kDqk, kDv, kCap>()};
}

template <typename T, bool kCap>
BackwardInstances of_type(const BackwardPlan& plan) {
  switch (plan.d_qk) {
    case 64:
      return of_size<T, 64, 64, kCap>(plan.sums);
    case 128:
      return of_size<T, 128, 128, kCap>(plan.sums);
    case 192:
      return of_size<T, 192, 128, kCap>(plan.sums);
    default:
      return of_size<T, 256, 256, kCap>(plan.sums);
  }
}

}  // namespace

BackwardInstances find_backward_instances(const BackwardPlan& plan, DType dtype, bool softcap) {
  if (dtype == DType::bf16)
    return softcap ? of_type<__nv_bfloat16, true>(plan) : of_type<__nv_bfloat16, false>(plan);
  return softcap ? of_type<__half, true>(plan) : of_type<__half, false>(plan);
}

}  // namespace basin::attention::sm90
