// Is a problem well formed, and which implementation can run it?
#pragma once

#include <string>

#include "basin/attention/attention.h"

namespace basin::attention {

/// Throws Error(invalid_argument), naming the field and the values, when shapes, dtypes, strides, lengths or page numbers
/// contradict each other or the numbers are not finite. Looks at metadata and page numbers, never at tensor data.
void check(const Forward& problem);
void check(const Backward& problem);

/// Empty when `backend` can run the (checked) problem, else one sentence: what was asked for and what exists.
std::string unsupported_reason(const Forward& problem, Backend backend);

}  // namespace basin::attention
