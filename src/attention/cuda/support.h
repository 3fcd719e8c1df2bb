// Problems as the plan function sees them.
#pragma once

#include "attention/cuda/sm90/backward/choose.h"
#include "attention/cuda/sm90/choose.h"
#include "basin/attention/cuda.h"

namespace basin::attention::cuda {

/// Of a problem that has been checked.
sm90::Shape shape_of(const Forward& problem);

/// Of a problem that has been checked, and whose head sizes exist.
sm90::BackwardPlan plan_of(const Backward& problem);

/// `supported` for a problem that has been checked.
std::string unsupported_reason(const Forward& problem);
std::string unsupported_reason(const Backward& problem);

/// The same for the layout of one tensor: what the copy engine and 16-byte loads and stores ask of it.
std::string unsupported_layout(const char* what, const ConstView& view);

}  // namespace basin::attention::cuda
