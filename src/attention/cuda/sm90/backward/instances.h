// The kernels of the backward pass that exist, one source file for each head size under instances/.
#pragma once

#include "attention/cuda/sm90/backward/choose.h"
#include "attention/cuda/sm90/instances.h"

namespace basin::attention::sm90 {

/// dk and dv of blocks of keys; with kSums also the shares of dq: keys.cuh.
template <typename T, int kDqk, int kDv, bool kCap, bool kSums>
Instance backward_keys_instance();

/// dq of blocks of query rows: queries.cuh.
template <typename T, int kDqk, int kDv, bool kCap>
Instance backward_queries_instance();

/// Adds the shares of strips: strips.cuh.
template <typename T, int kDqk, int kDv>
Instance backward_fold_instance();

struct BackwardInstances {
  Instance keys;
  Instance fold;     // null where dq is summed: then there is no window, so there are no strips
  Instance queries;  // null where dq is summed
};

/// The kernels of a plan for tensors of `dtype` (bf16 or f16).
BackwardInstances find_backward_instances(const BackwardPlan& plan, DType dtype, bool softcap);

}  // namespace basin::attention::sm90
