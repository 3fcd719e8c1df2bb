#include "attention/cuda/sm90/backward/keys.cuh"
#include "attention/cuda/sm90/backward/queries.cuh"
#include "attention/cuda/sm90/backward/strips.cuh"

namespace basin::attention::sm90 {
template Instance backward_keys_instance<__nv_bfloat16, 64, 64, false, true>();
template Instance backward_keys_instance<__nv_bfloat16, 64, 64, false, false>();
template Instance backward_queries_instance<__nv_bfloat16, 64, 64, false>();
template Instance backward_keys_instance<__nv_bfloat16, 64, 64, true, false>();
template Instance backward_queries_instance<__nv_bfloat16, 64, 64, true>();
template Instance backward_keys_instance<__half, 64, 64, false, true>();
template Instance backward_keys_instance<__half, 64, 64, false, false>();
template Instance backward_queries_instance<__half, 64, 64, false>();
template Instance backward_keys_instance<__half, 64, 64, true, false>();
template Instance backward_queries_instance<__half, 64, 64, true>();
template Instance backward_fold_instance<__nv_bfloat16, 64, 64>();
template Instance backward_fold_instance<__half, 64, 64>();
}  // namespace basin::attention::sm90
