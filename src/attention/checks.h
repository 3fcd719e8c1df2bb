// What the checks of problems on the host and on a device share: the rules of a spec, and the wording.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "basin/attention/spec.h"
#include "basin/base/error.h"

namespace basin::attention {

[[noreturn]] inline void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what);
}

/// "[2, 3, 64]".
template <typename Pointer>
std::string shape_text(const BasicView<Pointer>& view) {
  std::string text;
  for (int i = 0; i < view.rank; ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", view.shape[static_cast<std::size_t>(i)]);
  return "[" + text + "]";
}

/// Has no elements, so that its data and its strides are never used.
template <typename Pointer>
bool is_empty(const BasicView<Pointer>& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[static_cast<std::size_t>(i)] == 0) return true;
  }
  return false;
}

/// Throws Error(invalid_argument) for numbers that no problem may have.
inline void check_spec(const Spec& spec) {
  if (!std::isfinite(spec.scale)) refuse(fmt::format("scale is {}; it must be finite", spec.scale));
  if (!std::isfinite(spec.softcap) || spec.softcap < 0)
    refuse(fmt::format("softcap is {}; it must be 0 (off) or positive", spec.softcap));
  if (spec.mask.window < 0)
    refuse(
        fmt::format("window is {}; it counts visible keys including self, 0 = unlimited", spec.mask.window));
  if (spec.mask.window_right < -1)
    refuse(fmt::format("window_right is {}; allowed are -1 (unlimited), 0, 1, ...", spec.mask.window_right));
  if (spec.mask.sink_tokens < 0)
    refuse(fmt::format("sink_tokens is {}; it must be 0 or more", spec.mask.sink_tokens));
}

}  // namespace basin::attention
