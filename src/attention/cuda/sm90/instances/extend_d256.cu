#include "attention/cuda/sm90/extend.cuh"

namespace basin::attention::sm90 {
template Instance extend_instance<__nv_bfloat16, 256, 256, false>();
template Instance extend_instance<__half, 256, 256, false>();
template Instance extend_instance<__nv_bfloat16, 256, 256, true>();
template Instance extend_instance<__half, 256, 256, true>();
}  // namespace basin::attention::sm90
