#include "attention/cuda/sm90/decode.cuh"

namespace basin::attention::sm90 {
template Instance decode_instance<__nv_bfloat16, 64, 64, 8, false>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 8, false, true>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 16, false>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 32, false>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 64, false>();
template Instance decode_instance<__half, 64, 64, 8, false>();
template Instance decode_instance<__half, 64, 64, 8, false, true>();
template Instance decode_instance<__half, 64, 64, 16, false>();
template Instance decode_instance<__half, 64, 64, 32, false>();
template Instance decode_instance<__half, 64, 64, 64, false>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 8, true>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 8, true, true>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 16, true>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 32, true>();
template Instance decode_instance<__nv_bfloat16, 64, 64, 64, true>();
template Instance decode_instance<__half, 64, 64, 8, true>();
template Instance decode_instance<__half, 64, 64, 8, true, true>();
template Instance decode_instance<__half, 64, 64, 16, true>();
template Instance decode_instance<__half, 64, 64, 32, true>();
template Instance decode_instance<__half, 64, 64, 64, true>();
}  // namespace basin::attention::sm90
