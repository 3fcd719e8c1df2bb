#include "attention/cuda/sm90/choose.h"

#include <algorithm>

#include "attention/cuda/sm90/bounds.h"

namespace basin::attention::sm90 {
namespace {

int grid(std::int64_t units, std::int64_t most) {
  return static_cast<int>(std::clamp<std::int64_t>(units, 1, most));
}

/// Segments of which a row of decode sees anything, at most. A row without keys counts as one: its output must be written.
std::int64_t seen_segments(const Shape& shape, std::int64_t segment_keys) {
  std::int64_t segments = divide_up(shape.max_kv_tokens, segment_keys);
  if (shape.window > 0) {
    // The rows are the last ones of a sequence, so their windows end with it, and may begin anywhere in a segment.
    const std::int64_t keys = sum(shape.window, std::max<std::int64_t>(shape.max_q_tokens, 1) - 1);
    const std::int64_t recent = divide_up(keys - 1, segment_keys) + 1;
    segments = std::min(segments, sum(divide_up(shape.sink_tokens, segment_keys), recent));
  }
  return std::max<std::int64_t>(segments, 1);
}

/// The fold of rows that the decode kernel does not fold itself.
void plan_fold(const Shape& shape, int multiprocessors, Plan& plan) {
  const bool folds = decode_folds(plan.rows, plan.d_v);
  if (folds && (plan.segments == 1 || plan.gangs == 1)) return;
  // Those of sequences that gangs share, at most one at each border between gangs.
  const std::int64_t sequences = folds ? std::min<std::int64_t>(shape.batch, plan.gangs - 1) : shape.batch;
  const std::int64_t rows =
      product(product(sequences, shape.h_q), std::max<std::int64_t>(shape.max_q_tokens, 1));
  if (rows == 0) return;
  plan.fold_threads = plan.segments <= kWarpFoldSegments ? 32 : kFoldThreads;
  plan.fold_segments = fold_segments(plan.d_v, plan.fold_threads, plan.segments);
  plan.fold_ctas = divide_up(rows, kFoldThreads / plan.fold_threads);
  // More memory than they need spreads few CTAs over all multiprocessors.
  const std::int64_t share = kFoldMemory / divide_up(plan.fold_ctas, multiprocessors);
  const int needed = kFoldThreads / plan.fold_threads * fold_bytes(plan.d_v, plan.fold_segments);
  plan.fold_bytes = static_cast<int>(std::max<std::int64_t>(share, needed));
}

}  // namespace

const HeadSizes* find_head_sizes(std::int64_t d_qk, std::int64_t d_v) {
  const auto* found = std::find_if(std::begin(kHeadSizes), std::end(kHeadSizes), [&](const HeadSizes& sizes) {
    return d_qk <= sizes.d_qk && d_v <= sizes.d_v;
  });
  return found == std::end(kHeadSizes) ? nullptr : found;
}

Plan plan(const Shape& shape, int multiprocessors) {
  const HeadSizes& sizes = *find_head_sizes(shape.d_qk, shape.d_v);
  const std::int64_t q_tokens = std::max<std::int64_t>(shape.max_q_tokens, 1);
  const std::int64_t group = shape.h_q / shape.h_kv;
  Plan plan;
  plan.d_qk = sizes.d_qk;
  plan.d_v = sizes.d_v;
  plan.tile_keys = sizes.tile_keys;
  plan.counter_bytes = kCounters * sizeof(std::uint32_t);
  plan.workspace_bytes = plan.counter_bytes;
  if (shape.second_query && group <= kExtendRows && q_tokens > kMaxSecondQueryRows / group) {
    plan.path = Path::extend;
    plan.block_tokens = static_cast<int>(std::min(q_tokens, kExtendRows / group));
    plan.rows = static_cast<int>(plan.block_tokens * group);
    plan.blocks = divide_up(q_tokens, plan.block_tokens);
    plan.segments = std::max<std::int64_t>(divide_up(shape.max_kv_tokens, sizes.segment_keys), 1);
    plan.units = product(product(product(shape.batch, shape.h_kv), plan.blocks), plan.segments);
    plan.ctas = grid(plan.units, multiprocessors);
    plan.workspace_bytes +=
        static_cast<std::size_t>(product(plan.units, 4 * state_floats(plan.rows, plan.d_v)));
    return plan;
  }
  // (Divided, not multiplied: max_q_tokens may be any upper bound.)
  if (q_tokens > sizes.decode_rows / group) {
    plan.path = Path::prefill;
    plan.rows = sizes.prefill_rows;
    plan.units = product(product(shape.batch, shape.h_q), divide_up(q_tokens, plan.rows));
    plan.ctas = grid(plan.units, std::min(multiprocessors, kMaxMultiprocessors));
    if (shape.max_kv_tokens > sizes.segment_keys) {  // else there is nothing to fold
      plan.workspace_bytes += static_cast<std::size_t>(sizes.total_bytes) *
                              static_cast<std::size_t>(grid(plan.units, kMaxMultiprocessors));
    }
    return plan;
  }
  plan.path = Path::decode;
  plan.rows = *std::find_if(std::begin(kDecodeRows), std::end(kDecodeRows),
                            [&](int rows) { return q_tokens * group <= rows; });
  plan.segments = seen_segments(shape, sizes.segment_keys);
  plan.units = product(product(shape.batch, shape.h_kv), plan.segments);
  plan.alone = plan.rows == 8 && plan.d_qk <= 128 && plan.units <= multiprocessors;
  // The kernel deals segments to gangs of h_kv CTAs, one for each key head.
  const std::int64_t resident =
      std::int64_t{decode_ctas_per_multiprocessor(plan.rows, plan.d_qk, plan.alone)} * multiprocessors;
  plan.gangs = grid(product(shape.batch, plan.segments), std::max<std::int64_t>(resident / shape.h_kv, 1));
  plan.ctas = static_cast<int>(plan.gangs * shape.h_kv);
  plan_fold(shape, multiprocessors, plan);
  // A saved segment: accumulators, then (m, l), of every row.
  const std::int64_t state_bytes = std::int64_t{plan.rows} * (plan.d_v + 2) * 4;
  plan.workspace_bytes += static_cast<std::size_t>(product(plan.units, state_bytes));
  return plan;
}

}  // namespace basin::attention::sm90
