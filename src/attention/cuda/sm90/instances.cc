// The list of compiled kernels. A new file under instances/ gets its line here.
#include "attention/cuda/sm90/instances.h"

#include <fmt/format.h>

#include "basin/base/error.h"

struct __nv_bfloat16;  // what cuda_bf16.h and cuda_fp16.h define
struct __half;

namespace basin::attention::sm90 {
namespace {

template <typename T, int kDqk, int kDv, bool kCap>
Instance of_path(const Plan& plan) {
  if (plan.path == Path::prefill) return prefill_instance<T, kDqk, kDv, kCap>();
  if (plan.path == Path::extend) return extend_instance<T, kDqk, kDv, kCap>();
  switch (plan.rows) {
    case 8:
      if constexpr (kDqk <= 128) {
        if (plan.alone) return decode_instance<T, kDqk, kDv, 8, kCap, true>();
      }
      return decode_instance<T, kDqk, kDv, 8, kCap>();
    case 16:
      return decode_instance<T, kDqk, kDv, 16, kCap>();
    case 32:
      return decode_instance<T, kDqk, kDv, 32, kCap>();
    default:
      if constexpr (kDqk <= 64) return decode_instance<T, kDqk, kDv, 64, kCap>();
      break;  // `plan` asks for 64 rows of small heads only
  }
  throw Error(ErrorCode::internal,
              fmt::format("no decode kernel has {} rows of head size {}", plan.rows, plan.d_qk));
}

template <typename T, bool kCap>
Instance of_size(const Plan& plan) {
  switch (plan.d_qk) {
    case 64:
      return of_path<T, 64, 64, kCap>(plan);
    case 128:
      return of_path<T, 128, 128, kCap>(plan);
    case 192:
      return of_path<T, 192, 128, kCap>(plan);
    default:
      return of_path<T, 256, 256, kCap>(plan);
  }
}

}  // namespace

Instance find_instance(const Plan& plan, DType dtype, bool softcap) {
  if (dtype == DType::bf16)
    return softcap ? of_size<__nv_bfloat16, true>(plan) : of_size<__nv_bfloat16, false>(plan);
  return softcap ? of_size<__half, true>(plan) : of_size<__half, false>(plan);
}

}  // namespace basin::attention::sm90
