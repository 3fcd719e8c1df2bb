// What the schedulers of both directions share: from a problem's views and sequences to the words of the kernels.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "attention/cpu/kernel.h"
#include "basin/attention/mask.h"
#include "basin/attention/softmax_state.h"

namespace basin::attention::cpu {

inline constexpr double kLog2E = 1.442695040888963407359925;
inline constexpr double kLn2 = 0.693147180559945309417232;

inline Storage storage(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return Storage::f16;
    case DType::bf16:
      return Storage::bf16;
    default:
      return Storage::f32;
  }
}

inline bool storable(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

/// Empty, or why this path does not take the head size.
inline std::string check_head(std::string_view what, std::int64_t d, int largest = kMaxHead) {
  if (d >= 16 && d <= largest && d % 16 == 0) return {};
  return fmt::format("{} is {}; the CPU path has 16, 32, ... {}", what, d, largest);
}

inline std::string check_view(std::string_view what, const ConstView& view) {
  const std::int64_t last = view.stride[static_cast<std::size_t>(view.rank - 1)];
  if (last == 1) return {};
  return fmt::format("the last dimension of {} has stride {}; the CPU path needs 1", what, last);
}

/// Empty, or why this path does not take the problem; `largest` is the head size that it goes up to.
inline std::string unsupported_views(const Forward& p, int largest) {
  for (const ConstView& view : {p.q, p.k, p.v}) {
    if (!storable(view.dtype) || view.dtype != p.q.dtype) {
      return fmt::format(
          "q, k and v are {}, {} and {}; the CPU path has f32, f16 or bf16, the same for all three",
          name(p.q.dtype), name(p.k.dtype), name(p.v.dtype));
    }
  }
  if (p.q_sink && p.q_sink.dtype != p.q.dtype) {
    return fmt::format("q_sink is {} and q is {}; the CPU path needs the same", name(p.q_sink.dtype),
                       name(p.q.dtype));
  }
  if (p.out.dtype != DType::f32 && p.out.dtype != p.q.dtype) {
    return fmt::format("out is {}; the CPU path writes f32 or the dtype of q, {}", name(p.out.dtype),
                       name(p.q.dtype));
  }
  std::string reason = check_head("d_qk", p.q.shape[2], largest);
  if (reason.empty()) reason = check_head("d_v", p.out.shape[2], largest);
  if (reason.empty()) reason = check_view("q", p.q);
  if (reason.empty() && p.q_sink) reason = check_view("q_sink", p.q_sink);
  if (reason.empty()) reason = check_view("k", p.k);
  if (reason.empty()) reason = check_view("v", p.v);
  if (reason.empty()) reason = check_view("out", p.out);
  return reason;
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// What query `i` of the sequence sees.
inline Visible visible_to(const Mask& mask, const Sequence& sequence, std::int64_t i) {
  const VisibleKeys keys = visible_keys(mask, query_position(sequence, i), sequence.kv_tokens);
  return {keys.sinks.end, keys.recent.begin, keys.recent.end};
}

inline const std::byte* bytes(const ConstView& view) {
  return static_cast<const std::byte*>(view.data);
}

inline KeyRows key_rows(const ConstView& view, const Sequence& sequence, std::int64_t kv_head) {
  const std::int64_t size = block_bytes(view.dtype);
  KeyRows rows;
  if (view.rank == 4) {
    rows.base = bytes(view) + kv_head * view.stride[2] * size;
    rows.row_bytes = view.stride[1] * size;
    rows.page_bytes = view.stride[0] * size;
    rows.page_tokens = view.shape[1];
    rows.pages = sequence.pages;
  } else {
    rows.base = bytes(view) + (sequence.kv_begin * view.stride[0] + kv_head * view.stride[1]) * size;
    rows.row_bytes = view.stride[0] * size;
  }
  return rows;
}

/// score_scale and softcap of a block.
inline void set_arithmetic(const Spec& spec, Block& block) {
  if (spec.softcap != 0.0) {
    block.score_scale = static_cast<float>(spec.scale / spec.softcap);
    block.softcap = static_cast<float>(spec.softcap * kLog2E);
  } else {
    block.score_scale = static_cast<float>(spec.scale * kLog2E);
    block.softcap = 0.0f;
  }
}

/// value(d) for d in [0, count) into elements of `view` from `offset` on. + 0 turns -0 into +0, so that keys without weight
/// cannot show in the sign of a zero.
template <typename Value>
void store_elements(const View& view, std::int64_t offset, std::int64_t count, const Value& value) {
  switch (view.dtype) {
    case DType::f16: {
      f16* to = static_cast<f16*>(view.data) + offset;
      for (std::int64_t d = 0; d < count; ++d) to[d] = to_f16(value(d) + 0.0f);
      break;
    }
    case DType::bf16: {
      bf16* to = static_cast<bf16*>(view.data) + offset;
      for (std::int64_t d = 0; d < count; ++d) to[d] = to_bf16(value(d) + 0.0f);
      break;
    }
    default: {
      float* to = static_cast<float*>(view.data) + offset;
      for (std::int64_t d = 0; d < count; ++d) to[d] = value(d) + 0.0f;
    }
  }
}

/// The end of a row: the query in row `token` of q, head `head`. `m` is in base 2, `l` folded, `acc` [d_v].
inline void finish_row(const Forward& p, std::int64_t token, std::int64_t head, float m, float l,
                       const float* acc) {
  PartialState<double> state;
  state.m = static_cast<double>(m) * kLn2;
  state.l = static_cast<double>(l);
  const auto end = finish(state, p.sink_logit ? static_cast<double>(p.sink_logit[head]) : kNoSink);
  const auto factor = static_cast<float>(end.factor);
  store_elements(p.out, token * p.out.stride[0] + head * p.out.stride[1], p.out.shape[2],
                 [=](std::int64_t d) { return acc[d] * factor; });
  const std::int64_t at = head * p.q.shape[0] + token;
  if (p.lse) p.lse[at] = static_cast<float>(end.lse);
  if (p.lse_with_sink) p.lse_with_sink[at] = static_cast<float>(end.lse_with_sink);
}

}  // namespace basin::attention::cpu
