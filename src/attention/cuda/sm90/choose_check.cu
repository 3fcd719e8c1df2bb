// Holds the numbers of choose.h to those that the kernels are compiled for. It makes no code.
#include "attention/cuda/sm90/choose.h"
#include "attention/cuda/sm90/prefill_layout.cuh"

namespace basin::attention::sm90 {
namespace {

template <int kIndex>
constexpr bool matches() {
  constexpr HeadSizes kSizes = kHeadSizes[kIndex];
  using Kernel = PrefillLayout<__nv_bfloat16, kSizes.d_qk, kSizes.d_v, false>;
  return kSizes.tile_keys == tile_keys(kSizes.d_qk) && kSizes.segment_keys == segment_keys(kSizes.d_qk) &&
         kSizes.prefill_rows == Kernel::kRows && kSizes.total_bytes == Kernel::kTotalBytes;
}
static_assert(matches<0>());
static_assert(matches<1>());
static_assert(matches<2>());
static_assert(matches<3>());
static_assert(sizeof(kHeadSizes) == 4 * sizeof(HeadSizes), "one static_assert for each");

}  // namespace
}  // namespace basin::attention::sm90
