#include "attention/cuda/sm90/decode.cuh"

namespace basin::attention::sm90 {
template Instance decode_instance<__nv_bfloat16, 128, 128, 8, false>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 8, false, true>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 16, false>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 32, false>();
template Instance decode_instance<__half, 128, 128, 8, false>();
template Instance decode_instance<__half, 128, 128, 8, false, true>();
template Instance decode_instance<__half, 128, 128, 16, false>();
template Instance decode_instance<__half, 128, 128, 32, false>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 8, true>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 8, true, true>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 16, true>();
template Instance decode_instance<__nv_bfloat16, 128, 128, 32, true>();
template Instance decode_instance<__half, 128, 128, 8, true>();
template Instance decode_instance<__half, 128, 128, 8, true, true>();
template Instance decode_instance<__half, 128, 128, 16, true>();
template Instance decode_instance<__half, 128, 128, 32, true>();
}  // namespace basin::attention::sm90
