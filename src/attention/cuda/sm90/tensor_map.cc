#include "attention/cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>

#include "attention/checks.h"
#include "basin/base/error.h"

namespace basin::attention::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that nothing links against the driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    throw Error(ErrorCode::unsupported, "the CUDA driver has no tensor maps",
                "install a driver for CUDA 12 or later");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap tensor_map(const ConstView& view, int tokens, int heads, const void* placeholder) {
  static const Encode encode = find_encode();
  const std::size_t column = static_cast<std::size_t>(view.rank) - 1, head = column - 1, token = column - 2;
  const bool paged = view.rank == 4;
  const bool empty = is_empty(view);
  // The stride of a single element may be anything at all, but the driver looks at it.
  constexpr std::int64_t kAnyStride = 16;
  const auto bytes = [&](std::size_t i) {
    return static_cast<cuuint64_t>(empty || view.shape[i] == 1 ? kAnyStride
                                                               : view.stride[i] * block_bytes(view.dtype));
  };
  const auto extent = [&](std::int64_t n) { return static_cast<cuuint64_t>(std::max<std::int64_t>(n, 1)); };
  const cuuint64_t shape[4] = {extent(view.shape[column]), extent(view.shape[head]),
                               extent(view.shape[token]), extent(paged ? view.shape[0] : 1)};
  const cuuint64_t strides[3] = {bytes(head), bytes(token), paged ? bytes(0) : cuuint64_t{kAnyStride}};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(tokens), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  void* base = const_cast<void*>(empty ? placeholder : view.data);
  CUtensorMap map;
  const CUresult result = encode(
      &map, view.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      base, shape, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::internal,
                fmt::format("the CUDA driver refused a tensor map (error {}): shape [{}, {}, {}, {}], "
                            "strides [{}, {}, {}] bytes, "
                            "box [{}, {}, 64]",
                            static_cast<int>(result), shape[3], shape[2], shape[1], shape[0], strides[2],
                            strides[1], strides[0], tokens, heads));
  }
  return map;
}

}  // namespace basin::attention::sm90
