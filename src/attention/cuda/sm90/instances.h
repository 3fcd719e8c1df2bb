// The kernels that exist, one source file each under instances/. Adding one: a file there, a row in choose.cc, a row in the tests.
#pragma once

namespace basin::attention::sm90 {

/// A compiled kernel and the launch shape it was compiled for.
struct Instance {
  const void* kernel;
  int threads;
  int shared_bytes;
  int rows;  // query rows (of one head, or of a group in decode) that one CTA holds
};

/// Attention over blocks of query rows: prefill.cuh.
template <typename T, int kDqk, int kDv, bool kCap>
Instance prefill_instance();

/// Attention of a few query rows over segments of the keys: decode.cuh. kRows rows of one group of query heads.
template <typename T, int kDqk, int kDv, int kRows, bool kCap>
Instance decode_instance();

}  // namespace basin::attention::sm90
