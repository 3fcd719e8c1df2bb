// What every launch does on the host: fill in arguments, look at the workspace.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "attention/cuda/sm90/arguments.h"
#include "basin/attention/spec.h"
#include "basin/base/error.h"

namespace basin::attention::cuda {

/// Further than any two positions; longer windows are as good as this one.
inline constexpr std::int64_t kFar = std::int64_t{1} << 30;

inline int narrow(std::int64_t value) {
  return static_cast<int>(std::min(value, kFar));
}

inline void set_mask(const Mask& mask, sm90::Arguments& arguments) {
  arguments.causal = mask.causal ? 1 : 0;
  arguments.window = narrow(mask.window);
  arguments.window_right = narrow(mask.window_right);
  arguments.sink_tokens = narrow(mask.sink_tokens);
}

inline void expect_workspace(const void* workspace, std::size_t bytes, std::size_t needed) {
  constexpr std::size_t kAlignment = 16;
  if (workspace != nullptr && bytes >= needed &&
      reinterpret_cast<std::uintptr_t>(workspace) % kAlignment == 0)
    return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the workspace has {} bytes at {}; needed are {}, aligned to {}", bytes, workspace,
                          needed, kAlignment));
}

}  // namespace basin::attention::cuda
