#include "attention/cuda/support.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "attention/checks.h"
#include "attention/cuda/check.h"
#include "attention/cuda/factors.h"
#include "basin/base/error.h"

namespace basin::attention::cuda {
namespace {

constexpr std::int64_t kBytes = 16;                               // what the copy engine moves at least
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 30) - 1;  // positions and their sums fit in 32 bits
constexpr std::int64_t kMaxUnits = (std::int64_t{1} << 31) - 65536;  // tickets, with those of idle CTAs
constexpr std::int64_t kMaxStrideBytes = std::int64_t{1} << 40;      // of the copy engine
constexpr std::int64_t kHeadStep = 8;

std::string check_dtypes(const Forward& p) {
  const std::pair<const char*, ConstView> views[] = {
      {"q", p.q}, {"q_sink", p.q_sink}, {"k", p.k}, {"v", p.v}, {"out", p.out}};
  for (const auto& [what, view] : views) {
    if (view.data == nullptr && view.rank == 0) continue;  // q_sink may be absent
    if (view.dtype != DType::bf16 && view.dtype != DType::f16)
      return fmt::format("{} is {}; the sm_90 kernels have bf16 and f16", what, name(view.dtype));
    if (view.dtype != p.q.dtype) {
      return fmt::format("{} is {} and q is {}; the sm_90 kernels need one type for q, k, v and out", what,
                         name(view.dtype), name(p.q.dtype));
    }
  }
  return {};
}

std::string check_heads(const sm90::Shape& shape) {
  if (shape.d_qk % kHeadStep == 0 && shape.d_v % kHeadStep == 0 &&
      sm90::find_head_sizes(shape.d_qk, shape.d_v) != nullptr)
    return {};
  std::string sizes;
  for (const sm90::HeadSizes& size : sm90::kHeadSizes)
    sizes += fmt::format("{}({}, {})", sizes.empty() ? "" : ", ", size.d_qk, size.d_v);
  return fmt::format(
      "head sizes (d_qk, d_v) are ({}, {}); the sm_90 kernels have {} and multiples of {} below them",
      shape.d_qk, shape.d_v, sizes, kHeadStep);
}

std::string check_factors(const Spec& spec) {
  if (spec.scale <= 0) return fmt::format("scale is {}; the sm_90 kernels need a positive one", spec.scale);
  const Factors factors = factors_of(spec);
  if (!std::isnormal(factors.score) || (spec.softcap > 0 && !std::isnormal(factors.cap))) {
    return fmt::format(
        "scale {} with softcap {} leaves the range of fp32, in which the sm_90 kernels compute", spec.scale,
        spec.softcap);
  }
  return {};
}

std::string check_pages(const Forward& p) {
  if (p.page_table == nullptr) return {};
  const std::int64_t page = p.k.shape[1];
  if (std::has_single_bit(static_cast<std::uint64_t>(page))) return {};
  return fmt::format("page_tokens is {}; the sm_90 kernels have powers of two", page);
}

std::string check_counts(const Forward& p, const sm90::Shape& shape) {
  const std::pair<const char*, std::int64_t> counts[] = {
      {"batch", p.batch}, {"max_q_tokens", p.max_q_tokens}, {"max_kv_tokens", p.max_kv_tokens}};
  for (const auto& [what, count] : counts) {
    if (count > kMaxTokens)
      return fmt::format("{} is {}; the sm_90 kernels have up to {}", what, count, kMaxTokens);
  }
  const sm90::Plan plan = sm90::plan(shape, 1);
  if (plan.path == sm90::Path::decode) {
    const std::int64_t most = sm90::kMaxBlocks;
    if (p.batch > most / shape.h_kv) {
      return fmt::format("{} sequences with {} key heads are more than the {} pairs that decode on sm_90 has",
                         p.batch, shape.h_kv, most);
    }
    return {};
  }
  if (plan.path == sm90::Path::extend) {
    if (p.batch > sm90::kMaxBlocks / shape.h_kv / plan.blocks) {
      return fmt::format(
          "q_sink with {} sequences of {} query tokens and {} key heads is {} blocks of {} rows for each; "
          "the "
          "sm_90 kernels have up to {} in all",
          p.batch, p.max_q_tokens, shape.h_kv, plan.blocks, plan.rows, sm90::kMaxBlocks);
    }
    if (plan.units > kMaxUnits) {
      return fmt::format(
          "q_sink with {} sequences of up to {} keys is up to {} segments; the sm_90 kernels have up to {}",
          p.batch, p.max_kv_tokens, plan.units, kMaxUnits);
    }
    return {};
  }
  if (p.q_sink) {
    return fmt::format(
        "q_sink with {} query heads on each key head; the sm_90 kernels have a second query up to {}",
        shape.h_q / shape.h_kv, sm90::kExtendRows);
  }
  if (plan.units > kMaxUnits) {
    return fmt::format(
        "{} sequences of {} query tokens with {} heads are {} blocks of {} rows; the sm_90 kernels "
        "have up to {}",
        p.batch, p.max_q_tokens, shape.h_q, plan.units, plan.rows, kMaxUnits);
  }
  return {};
}

std::string check_counts(const Backward& p, const sm90::BackwardPlan& plan) {
  const Forward& f = p.forward;
  const std::pair<const char*, std::int64_t> counts[] = {
      {"batch", f.batch}, {"max_q_tokens", f.max_q_tokens}, {"max_kv_tokens", f.max_kv_tokens}};
  for (const auto& [what, count] : counts) {
    if (count > kMaxTokens)
      return fmt::format("{} is {}; the sm_90 kernels have up to {}", what, count, kMaxTokens);
  }
  if (plan.key_ctas > kMaxUnits || plan.query_ctas > kMaxUnits || plan.row_blocks > kMaxUnits / plan.h_q) {
    return fmt::format(
        "{} sequences of up to {} query tokens and {} keys with {} query heads are too many pieces for "
        "backward "
        "on sm_90",
        f.batch, f.max_q_tokens, f.max_kv_tokens, plan.h_q);
  }
  return {};
}

}  // namespace

sm90::Shape shape_of(const Forward& p) {
  sm90::Shape shape;
  shape.dtype = p.q.dtype;
  shape.batch = p.batch;
  shape.h_q = p.q.shape[static_cast<std::size_t>(p.q.rank - 2)];
  shape.h_kv = p.k.shape[static_cast<std::size_t>(p.k.rank - 2)];
  shape.d_qk = p.q.shape[static_cast<std::size_t>(p.q.rank - 1)];
  shape.d_v = p.v.shape[static_cast<std::size_t>(p.v.rank - 1)];
  shape.max_q_tokens = p.max_q_tokens;
  shape.max_kv_tokens = p.max_kv_tokens;
  shape.softcap = p.spec.softcap > 0;
  shape.second_query = static_cast<bool>(p.q_sink);
  shape.window = p.spec.mask.window;
  shape.sink_tokens = p.spec.mask.sink_tokens;
  return shape;
}

std::string unsupported_layout(const char* what, const ConstView& view) {
  if (view.rank == 0) return {};
  if (reinterpret_cast<std::uintptr_t>(view.data) % kBytes != 0) {
    return fmt::format("{} starts at address {}; the sm_90 kernels need multiples of {} bytes", what,
                       view.data, kBytes);
  }
  for (int i = 0; i < view.rank; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    if (view.shape[axis] > kMaxTokens)
      return fmt::format("{} has extent {} in dimension {}; the sm_90 kernels have up to {}", what,
                         view.shape[axis], i, kMaxTokens);
    if (view.shape[axis] <= 1 || i == view.rank - 1 || is_empty(view)) continue;
    const std::int64_t stride = view.stride[axis], size = block_bytes(view.dtype);
    if (stride < 1 || stride % (kBytes / size) != 0 || stride >= kMaxStrideBytes / size) {
      return fmt::format(
          "{} has stride {} in dimension {}; the sm_90 kernels need multiples of {} elements "
          "from {} to below {}",
          what, stride, i, kBytes / size, kBytes / size, kMaxStrideBytes / size);
    }
  }
  return {};
}

std::string unsupported_reason(const Forward& p) {
  const sm90::Shape shape = shape_of(p);
  std::string reason = check_dtypes(p);
  if (reason.empty()) reason = check_heads(shape);
  if (reason.empty()) reason = check_factors(p.spec);
  const std::pair<const char*, ConstView> views[] = {
      {"q", p.q}, {"q_sink", p.q_sink}, {"k", p.k}, {"v", p.v}, {"out", p.out}};
  for (const auto& [what, view] : views) {
    if (reason.empty()) reason = unsupported_layout(what, view);
  }
  if (reason.empty()) reason = check_pages(p);
  if (reason.empty()) reason = check_counts(p, shape);
  return reason;
}

sm90::BackwardPlan plan_of(const Backward& p) {
  const ConstView& q = p.forward.q;
  sm90::BackwardShape shape{shape_of(p.forward)};
  if (q.rank == 3) shape.total_q = q.shape[0];
  return sm90::backward_plan(shape);
}

std::string unsupported_reason(const Backward& p) {
  const Forward& f = p.forward;
  if (f.page_table != nullptr)
    return "keys are paged; backward on sm_90 has contiguous keys, dense or ragged";
  if (f.q_sink) return "q_sink has no backward: in-cache positions are for serving";
  const sm90::Shape shape = shape_of(f);
  std::string reason = check_dtypes(f);
  if (reason.empty()) reason = check_heads(shape);
  if (reason.empty()) reason = check_factors(f.spec);
  const std::pair<const char*, ConstView> views[] = {{"q", f.q},     {"k", f.k},       {"v", f.v},
                                                     {"out", f.out}, {"dout", p.dout}, {"dq", p.dq},
                                                     {"dk", p.dk},   {"dv", p.dv}};
  for (const auto& [what, view] : views) {
    if (reason.empty() && view.dtype != f.q.dtype) {
      reason = fmt::format("{} is {} and q is {}; backward on sm_90 needs one type for all tensors", what,
                           name(view.dtype), name(f.q.dtype));
    }
    if (reason.empty()) reason = unsupported_layout(what, view);
  }
  if (reason.empty()) reason = check_counts(p, plan_of(p));
  return reason;
}

std::string supported(const Forward& problem) {
  check(problem);
  return unsupported_reason(problem);
}

std::string supported(const Backward& problem) {
  check(problem);
  return unsupported_reason(problem);
}

}  // namespace basin::attention::cuda
