#include "attention/cuda/sm90/prefill.cuh"

namespace basin::attention::sm90 {
template Instance prefill_instance<__nv_bfloat16, 64, 64, true>();
template Instance prefill_instance<__half, 64, 64, true>();
}  // namespace basin::attention::sm90
