// The list of compiled kernels. A new file under instances/ gets its line here.
#include "attention/cuda/sm90/instances.h"

#include <fmt/format.h>

#include "basin/base/error.h"

struct __nv_bfloat16;  // what cuda_bf16.h and cuda_fp16.h define
struct __half;

namespace basin::attention::sm90 {
namespace {

template <typename T, int kD, bool kCap>
Instance square(const Plan& plan) {
  if (plan.path == Path::prefill) return prefill_instance<T, kD, kD, kCap>();
  switch (plan.rows) {
    case 8:
      return decode_instance<T, kD, kD, 8, kCap>();
    case 16:
      return decode_instance<T, kD, kD, 16, kCap>();
    case 32:
      return decode_instance<T, kD, kD, 32, kCap>();
    default:
      if constexpr (kD <= 64) return decode_instance<T, kD, kD, 64, kCap>();
      break;  // `plan` asks for 64 rows of small heads only
  }
  throw Error(ErrorCode::internal,
              fmt::format("no decode kernel has {} rows of head size {}", plan.rows, plan.d_qk));
}

template <typename T, bool kCap>
Instance of_size(const Plan& plan) {
  return plan.d_qk == 64 ? square<T, 64, kCap>(plan) : square<T, 128, kCap>(plan);
}

}  // namespace

Instance find_instance(const Plan& plan, DType dtype, bool softcap) {
  if (dtype == DType::bf16)
    return softcap ? of_size<__nv_bfloat16, true>(plan) : of_size<__nv_bfloat16, false>(plan);
  return softcap ? of_size<__half, true>(plan) : of_size<__half, false>(plan);
}

}  // namespace basin::attention::sm90
