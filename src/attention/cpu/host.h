// What the schedulers of both directions share: from a problem's views and sequences to the words of the kernels.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "attention/cpu/kernel.h"
#include "basin/attention/mask.h"

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
inline std::string check_head(std::string_view what, std::int64_t d) {
  if (d >= 16 && d <= kMaxHead && d % 16 == 0) return {};
  return fmt::format("{} is {}; the CPU path has 16, 32, ... {}", what, d, kMaxHead);
}

inline std::string check_view(std::string_view what, const ConstView& view) {
  const std::int64_t last = view.stride[static_cast<std::size_t>(view.rank - 1)];
  if (last == 1) return {};
  return fmt::format("the last dimension of {} has stride {}; the CPU path needs 1", what, last);
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

}  // namespace basin::attention::cpu
