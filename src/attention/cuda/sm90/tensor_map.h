// Descriptions of tensors for the bulk copy engine.
#pragma once

#include <cuda.h>

#include "basin/tensor/view.h"

namespace basin::attention::sm90 {

/// A map over `view` ([page, token, head, column], or [token, head, column] as one page) whose boxes hold 64 columns of one head
/// (or of `heads` neighbouring heads) over `tokens` tokens, in the 128-byte swizzle. Throws Error(internal) when the driver refuses.
CUtensorMap tensor_map(const ConstView& view, int tokens, int heads, const void* placeholder);

}  // namespace basin::attention::sm90
