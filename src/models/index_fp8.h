// Queries and keys of an indexer as servers keep them: in fp8, after a rotation that spreads large elements.
#pragma once

#include <cstdint>

#include "basin/base/thread_pool.h"

namespace basin::models {

/// Each row [d], d a power of two, becomes H x / sqrt(d) (H: Hadamard's matrix) and then the nearest multiples, by e4m3, of one
/// scale: the power of two from max|x| / 448 up, |x| taken as 1e-4 at least. Products of two such rows are exact in float.
void to_index_fp8(float* x, std::int64_t rows, std::int64_t d, ThreadPool& pool);

}  // namespace basin::models
