// The kernels that exist, one source file each under instances/. Adding one: a file there, its line in instances.cc and in
// CMakeLists.txt, a row in choose.h, a row in the tests.
#pragma once

#include "attention/cuda/sm90/choose.h"

namespace basin::attention::sm90 {

/// A compiled kernel and the launch shape it was compiled for.
struct Instance {
  const void* kernel = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int rows = 0;                // query rows (prefill: of one head; else of a group) that one CTA holds
  const void* fold = nullptr;  // decode: the kernel that folds saved segments (decode_fold.cuh)
};

/// Attention over blocks of query rows: prefill.cuh.
template <typename T, int kDqk, int kDv, bool kCap>
Instance prefill_instance();

/// Attention of a few query rows over segments of the keys: decode.cuh. kRows rows of one group of query heads; kAlone: for
/// plans that are `alone`.
template <typename T, int kDqk, int kDv, int kRows, bool kCap, bool kAlone = false>
Instance decode_instance();

/// Attention of blocks of query rows over segments of the keys: extend.cuh.
template <typename T, int kDqk, int kDv, bool kCap>
Instance extend_instance();

/// The kernel of a plan for tensors of `dtype` (bf16 or f16).
Instance find_instance(const Plan& plan, DType dtype, bool softcap);

}  // namespace basin::attention::sm90
