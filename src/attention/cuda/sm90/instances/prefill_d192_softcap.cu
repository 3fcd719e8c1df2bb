#include "attention/cuda/sm90/prefill.cuh"

namespace basin::attention::sm90 {
template Instance prefill_instance<__nv_bfloat16, 192, 128, true>();
template Instance prefill_instance<__half, 192, 128, true>();
}  // namespace basin::attention::sm90
