// Problems as the plan function sees them.
#pragma once

#include "attention/cuda/sm90/choose.h"
#include "basin/attention/cuda.h"

namespace basin::attention::cuda {

/// Of a problem that has been checked.
sm90::Shape shape_of(const Forward& problem);

/// `supported` for a problem that has been checked.
std::string unsupported_reason(const Forward& problem);

}  // namespace basin::attention::cuda
