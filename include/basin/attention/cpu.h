// The fast CPU path of attention: f32, f16 and bf16 storage, fp32 accumulation, every feature of spec.h.
//
// Forward and backward.
//
// Promise: a row of the output depends, bit for bit, on its own visible keys only. Chunk size, page size, batch,
// threads, masked or absent neighbours do not change it (src/attention/cpu/constants.h has the order of operations). The
// gradients dq, dk and dv of a sequence depend on that sequence only; dsink_logit, a sum over the batch, is the same for equal
// calls (src/attention/cpu/backward_kernel.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "basin/attention/selection.h"
#include "basin/attention/spec.h"
#include "basin/base/thread_pool.h"

namespace basin::attention::cpu {

/// Empty when this path can run the problem, else one sentence that names what was asked for and what exists.
/// Looks at dtypes, head sizes and strides only.
std::string supported(const Forward& problem);

/// Runs a problem whose shapes and lengths have been checked. Throws Error(unsupported) with the text of
/// `supported` when that is not empty; nothing has been written then.
void forward(const Forward& problem, ThreadPool& pool);

/// The same for the backward pass.
std::string supported(const Backward& problem);
void backward(const Backward& problem, ThreadPool& pool);

/// Attention over selected keys, for head sizes to 576: made for many query heads over one key head. The order of operations is
/// that of `forward`, so the bits are, too.
std::string supported(const Forward& problem, const Selection& selection);
void forward(const Forward& problem, const Selection& selection, ThreadPool& pool);

/// Index scores in float, one FMA chain over d for each head and one over heads; then select_topk.
std::string supported(const Indexer& indexer);
void select(const Indexer& indexer, ThreadPool& pool);

/// Writes the positions of the `topk` largest scores to out[topk], ascending, and returns how many they are: of equal scores (0 and
/// -0 are equal) the first, all of them while there are at most `topk`. A radix select: exact whatever the values, linear in
/// their number. Throws Error(invalid_argument) naming a score that is NaN.
std::int64_t select_topk(std::span<const float> scores, std::int64_t topk, std::int32_t* out);

/// The target of this process: "generic", "avx2", "avx512_bf16" or "amx", where `forward` runs the kernels of avx512_bf16.
std::string_view target_name();

}  // namespace basin::attention::cpu
