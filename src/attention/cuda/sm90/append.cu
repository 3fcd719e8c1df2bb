#include "attention/cuda/sm90/append.h"

namespace basin::attention::sm90 {
namespace {

/// The last sequence that begins at or before `row`; -1: none. All lanes of a warp look together.
__device__ int find_sequence(const std::int32_t* begin, int batch, int row, int lane) {
  int first = 0, count = batch;  // where it is, if there is one
  for (;;) {
    const int step = (count + 31) / 32, probe = lane * step;
    const bool reached = probe < count && __ldg(begin + first + probe) <= row;
    const int last = __popc(__ballot_sync(0xffffffffu, reached)) - 1;
    if (last < 0) return -1;
    first += last * step;
    count = min(step, count - last * step);
    if (step == 1) return first;
  }
}

__global__ void __launch_bounds__(32 * kAppendWarps)
    append(const __grid_constant__ AppendArguments arguments) {
  constexpr int kChunks = kAppendPieceChunks / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int per_row = arguments.sides[0].pieces + arguments.sides[1].pieces;
  const unsigned unit = blockIdx.x * kAppendWarps + threadIdx.x / 32;
  const int row = static_cast<int>(unit / static_cast<unsigned>(per_row));
  if (row >= arguments.rows) return;
  int piece = static_cast<int>(unit) - row * per_row;
  const int which = piece >= arguments.sides[0].pieces ? 1 : 0;
  if (which == 1) piece -= arguments.sides[0].pieces;
  const AppendSide& side = arguments.sides[which];

  // The data is on its way while the place is looked up. (All rows of the tensor may be read, used or not.)
  const bool dense = arguments.new_begin == nullptr;
  int sequence = dense ? row / arguments.new_tokens : 0;
  const int from_row = dense ? row % arguments.new_tokens : row;
  const auto* from =
      static_cast<const uint4*>(side.from) + sequence * side.from_sequence + from_row * side.from_token;
  uint4 data[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = piece * kAppendPieceChunks + 32 * i + lane;
    if (chunk < side.chunks)
      data[i] = __ldg(from + chunk / side.head_chunks * side.from_head + chunk % side.head_chunks);
  }

  int end = arguments.new_tokens, at = from_row;
  if (!dense) {
    sequence = find_sequence(arguments.new_begin, arguments.batch, row, lane);
    if (sequence < 0) return;
    end = __ldg(arguments.new_begin + sequence + 1);
    if (at >= end) return;
  }
  const int tokens = __ldg(arguments.kv_tokens + sequence);
  if (tokens < end - at) return;
  const int position = tokens - (end - at);
  const int entry = position / arguments.page_tokens;
  if (entry >= arguments.page_table_stride) return;
  const int page = __ldg(arguments.page_table + sequence * arguments.page_table_stride + entry);
  if (page < 0 || page >= arguments.pages) return;
  auto* to =
      static_cast<uint4*>(side.to) + page * side.to_page + position % arguments.page_tokens * side.to_token;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = piece * kAppendPieceChunks + 32 * i + lane;
    if (chunk < side.chunks) to[chunk / side.head_chunks * side.to_head + chunk % side.head_chunks] = data[i];
  }
}

}  // namespace

const void* append_kernel() {
  return reinterpret_cast<const void*>(&append);
}

}  // namespace basin::attention::sm90
