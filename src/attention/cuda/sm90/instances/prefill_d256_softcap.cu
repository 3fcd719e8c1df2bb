#include "attention/cuda/sm90/prefill.cuh"

namespace basin::attention::sm90 {
template Instance prefill_instance<__nv_bfloat16, 256, 256, true>();
template Instance prefill_instance<__half, 256, 256, true>();
}  // namespace basin::attention::sm90
