#include <fmt/format.h>

#include <utility>

#include "attention/cuda/check.h"
#include "attention/cuda/device.h"
#include "attention/cuda/sm90/append.h"
#include "attention/cuda/support.h"
#include "basin/base/error.h"

namespace basin::attention::cuda {
namespace {

constexpr std::int64_t kChunkBytes = 16;
constexpr std::int64_t kMaxTokenElements = std::int64_t{1} << 24;  // far beyond any model, and no sum wraps
constexpr std::int64_t kMaxPieces = (std::int64_t{1} << 31) - 1;

std::int64_t pieces(const ConstView& pages) {
  const std::int64_t chunks = pages.shape[2] * pages.shape[3] * block_bytes(pages.dtype) / kChunkBytes;
  return (chunks + sm90::kAppendPieceChunks - 1) / sm90::kAppendPieceChunks;
}

/// Of new tokens, at most.
std::int64_t rows(const Append& a) {
  return a.new_k.shape[0] * (a.new_begin == nullptr ? a.new_k.shape[1] : 1);
}

// Of a problem that has been checked.
std::string unsupported_reason(const Append& a) {
  const std::pair<const char*, ConstView> views[] = {
      {"new_k", a.new_k}, {"new_v", a.new_v}, {"k", a.k}, {"v", a.v}};
  for (const auto& [what, view] : views) {
    if (view.dtype != DType::bf16 && view.dtype != DType::f16)
      return fmt::format("{} is {}; appending on sm_90 has bf16 and f16", what, name(view.dtype));
    if (view.dtype != a.k.dtype)
      return fmt::format("{} is {} and k is {}; appending on sm_90 needs one type", what, name(view.dtype),
                         name(a.k.dtype));
    const std::int64_t d = view.shape[static_cast<std::size_t>(view.rank - 1)];
    const std::int64_t step = kChunkBytes / block_bytes(view.dtype);
    if (d % step != 0)
      return fmt::format("{} has head size {}; appending on sm_90 has multiples of {}", what, d, step);
    if (std::string reason = unsupported_layout(what, view); !reason.empty()) return reason;
    const std::int64_t heads = view.shape[static_cast<std::size_t>(view.rank - 2)];
    if (heads > kMaxTokenElements / d)
      return fmt::format("{} has {} heads of size {}; appending on sm_90 has up to {} elements of a token",
                         what, heads, d, kMaxTokenElements);
  }
  // (No product wraps: unsupported_layout has limited every extent to 30 bits.)
  const std::int64_t most = kMaxPieces / (pieces(a.k) + pieces(a.v));
  if (rows(a) > most)
    return fmt::format("{} new tokens are more than the {} of these heads that appending on sm_90 has",
                       rows(a), most);
  return {};
}

sm90::AppendSide side_of(const ConstView& from, const View& to) {
  // Strides of dimensions with one element may be anything; they are never used.
  const auto chunks = [](const ConstView& view, int axis) {
    return view.stride[static_cast<std::size_t>(axis)] * block_bytes(view.dtype) / kChunkBytes;
  };
  sm90::AppendSide side;
  side.from = from.data;
  side.from_sequence = from.rank == 4 ? chunks(from, 0) : 0;
  side.from_token = chunks(from, from.rank - 3);
  side.from_head = chunks(from, from.rank - 2);
  side.to = to.data;
  side.to_page = chunks(to, 0);
  side.to_token = chunks(to, 1);
  side.to_head = chunks(to, 2);
  side.head_chunks = static_cast<int>(to.shape[3] * block_bytes(to.dtype) / kChunkBytes);
  side.chunks = static_cast<int>(to.shape[2]) * side.head_chunks;
  side.pieces = static_cast<int>(pieces(to));
  return side;
}

}  // namespace

std::string supported(const Append& append) {
  check(append);
  return unsupported_reason(append);
}

void append(const Append& a, CUstream_st* stream) {
  if (const std::string reason = supported(a); !reason.empty()) throw Error(ErrorCode::unsupported, reason);
  current_device();
  if (rows(a) == 0 || a.k.shape[0] == 0) return;  // nothing to append, or no page
  sm90::AppendArguments arguments;
  arguments.batch = static_cast<int>(a.batch);
  arguments.rows = static_cast<int>(rows(a));
  arguments.new_tokens = static_cast<int>(a.new_begin == nullptr ? a.new_k.shape[1] : 0);
  arguments.page_tokens = static_cast<int>(a.k.shape[1]);
  arguments.pages = static_cast<int>(a.k.shape[0]);
  arguments.new_begin = a.new_begin;
  arguments.kv_tokens = a.kv_tokens;
  arguments.page_table = a.page_table;
  arguments.page_table_stride = a.page_table_stride;
  arguments.sides[0] = side_of(a.new_k, a.k);
  arguments.sides[1] = side_of(a.new_v, a.v);

  const std::int64_t units = rows(a) * (arguments.sides[0].pieces + arguments.sides[1].pieces);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((units + sm90::kAppendWarps - 1) / sm90::kAppendWarps));
  config.blockDim = dim3(32 * sm90::kAppendWarps);
  config.stream = stream;
  void* list[] = {&arguments};
  expect_success(cudaLaunchKernelExC(&config, sm90::append_kernel(), list), "launching the append of keys");
}

}  // namespace basin::attention::cuda
