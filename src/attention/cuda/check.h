// Is a problem well formed?
#pragma once

#include "basin/attention/cuda.h"

namespace basin::attention::cuda {

/// Throws Error(invalid_argument), naming the field and the values, when shapes, strides and upper bounds contradict each
/// other, a needed pointer is missing or the numbers are not finite. Looks at host data only.
void check(const Forward& problem);
void check(const Append& append);
void check(const Backward& problem);

}  // namespace basin::attention::cuda
