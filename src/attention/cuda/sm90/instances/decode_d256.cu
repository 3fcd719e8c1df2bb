#include "attention/cuda/sm90/decode.cuh"

namespace basin::attention::sm90 {
template Instance decode_instance<__nv_bfloat16, 256, 256, 8, false>();
template Instance decode_instance<__nv_bfloat16, 256, 256, 16, false>();
template Instance decode_instance<__nv_bfloat16, 256, 256, 32, false>();
template Instance decode_instance<__half, 256, 256, 8, false>();
template Instance decode_instance<__half, 256, 256, 16, false>();
template Instance decode_instance<__half, 256, 256, 32, false>();
template Instance decode_instance<__nv_bfloat16, 256, 256, 8, true>();
template Instance decode_instance<__nv_bfloat16, 256, 256, 16, true>();
template Instance decode_instance<__nv_bfloat16, 256, 256, 32, true>();
template Instance decode_instance<__half, 256, 256, 8, true>();
template Instance decode_instance<__half, 256, 256, 16, true>();
template Instance decode_instance<__half, 256, 256, 32, true>();
}  // namespace basin::attention::sm90
