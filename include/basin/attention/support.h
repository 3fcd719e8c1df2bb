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
std::string unsupported_reason(const Backward& problem, Backend backend);

/// Throws Error(unsupported) with that sentence unless it is empty.
void require_supported(const Forward& problem, Backend backend);
void require_supported(const Backward& problem, Backend backend);

}  // namespace basin::attention
