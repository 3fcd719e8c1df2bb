#pragma once

#include "weights/weights.h"

namespace basin::weights {

/// Maps what the page cache holds of the file now, rather than page by page at the first touch, which takes several times as
/// long. What it does not hold is left alone. For files that will be read whole.
void map_cached(const MappedFile& file);

}  // namespace basin::weights
