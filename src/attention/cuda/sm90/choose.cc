#include "attention/cuda/sm90/choose.h"

#include <algorithm>

#include "attention/cuda/sm90/bounds.h"

namespace basin::attention::sm90 {
namespace {

/// As many as registers and shared memory hold (decode.cuh).
int decode_ctas_per_multiprocessor(const Plan& plan) {
  return plan.rows * plan.d_qk <= 1024 && !plan.alone ? 2 : 1;
}

int grid(std::int64_t units, std::int64_t most) {
  return static_cast<int>(std::clamp<std::int64_t>(units, 1, most));
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
    plan.ctas = grid(plan.units, std::min(multiprocessors, kMaxPrefillCtas));
    if (shape.max_kv_tokens > sizes.segment_keys) {  // else there is nothing to fold
      plan.workspace_bytes += static_cast<std::size_t>(sizes.total_bytes) *
                              static_cast<std::size_t>(grid(plan.units, kMaxPrefillCtas));
    }
    return plan;
  }
  plan.path = Path::decode;
  plan.rows = *std::find_if(std::begin(kDecodeRows), std::end(kDecodeRows),
                            [&](int rows) { return q_tokens * group <= rows; });
  // A row without keys counts as one segment: its output must be written.
  plan.segments = std::max<std::int64_t>(divide_up(shape.max_kv_tokens, sizes.segment_keys), 1);
  plan.units = product(product(shape.batch, shape.h_kv), plan.segments);
  plan.alone = plan.rows == 8 && plan.d_qk <= 128 && plan.units <= multiprocessors;
  // The kernel deals segments to gangs of h_kv CTAs, one for each key head.
  const std::int64_t gangs =
      std::min(std::int64_t{decode_ctas_per_multiprocessor(plan)} * multiprocessors / shape.h_kv,
               product(shape.batch, plan.segments));
  plan.ctas = static_cast<int>(std::max<std::int64_t>(gangs, 1) * shape.h_kv);
  // A saved segment: accumulators, then (m, l), of every row.
  const std::int64_t state_bytes = std::int64_t{plan.rows} * (plan.d_v + 2) * 4;
  plan.workspace_bytes += static_cast<std::size_t>(product(plan.units, state_bytes));
  return plan;
}

}  // namespace basin::attention::sm90
