#include "attention/cuda/sm90/extend.cuh"

namespace basin::attention::sm90 {
template Instance extend_instance<__nv_bfloat16, 64, 64, false>();
template Instance extend_instance<__half, 64, 64, false>();
template Instance extend_instance<__nv_bfloat16, 64, 64, true>();
template Instance extend_instance<__half, 64, 64, true>();
}  // namespace basin::attention::sm90
