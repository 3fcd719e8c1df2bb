#include "attention/cuda/sm90/extend.cuh"

namespace basin::attention::sm90 {
template Instance extend_instance<__nv_bfloat16, 128, 128, false>();
template Instance extend_instance<__half, 128, 128, false>();
template Instance extend_instance<__nv_bfloat16, 128, 128, true>();
template Instance extend_instance<__half, 128, 128, true>();
}  // namespace basin::attention::sm90
