#include "attention/cuda/sm90/backward/choose.h"

#include <algorithm>

#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/bounds.h"

namespace basin::attention::sm90 {

BackwardPlan backward_plan(const BackwardShape& shape) {
  const HeadSizes& sizes = *find_head_sizes(shape.d_qk, shape.d_v);
  BackwardPlan plan;
  plan.d_qk = sizes.d_qk;
  plan.d_v = sizes.d_v;
  plan.h_q = shape.h_q;
  plan.sums = sizes.d_qk <= 128 && shape.window == 0 && !shape.softcap;
  plan.block_keys = backward_block_keys(sizes.d_qk);
  plan.tile_keys = backward_tile_keys(sizes.d_qk);
  plan.block_rows = backward_block_rows(sizes.d_qk);
  plan.row_blocks = shape.total_q < 0 ? product(shape.batch, divide_up(shape.max_q_tokens, kSumRows))
                                      : shape.total_q / kSumRows + shape.batch;
  const std::int64_t blocks = divide_up(shape.max_kv_tokens, plan.block_keys);
  // (A window that holds all keys leaves the strips without rows.)
  if (shape.window > 0 && shape.window < shape.max_kv_tokens && shape.sink_tokens > 0) {
    plan.sink_blocks = std::min(divide_up(shape.sink_tokens, plan.block_keys), blocks);
    plan.strips = divide_up(shape.max_q_tokens, kStripRows);
  }
  plan.key_ctas =
      product(product(shape.batch, shape.h_kv), sum(blocks, product(plan.sink_blocks, plan.strips)));
  plan.query_ctas = product(product(shape.batch, shape.h_q), divide_up(shape.max_q_tokens, plan.block_rows));

  std::int64_t total = 0;
  const auto take = [&](Buffer& buffer, std::int64_t elements) {
    constexpr std::int64_t kAlignment = 256;
    const std::int64_t bytes = product(elements, 4);
    buffer.offset = static_cast<std::size_t>(total);
    buffer.bytes = static_cast<std::size_t>(bytes);
    total = sum(total, product(divide_up(bytes, kAlignment), kAlignment));
  };
  const std::int64_t rows = product(product(shape.h_q, plan.row_blocks), kSumRows);
  take(plan.ticket, 1);
  take(plan.dsink_parts, product(plan.row_blocks, shape.h_q));
  take(plan.lse2, rows);
  take(plan.big_d, rows);
  if (plan.sums) {
    take(plan.dq_turns, product(rows / kUnitRows, plan.d_qk / kUnitColumns));
    take(plan.dq_sums, product(rows, plan.d_qk));
  }
  if (plan.sink_blocks > 0) {
    const std::int64_t shares =
        product(product(product(shape.batch, shape.h_kv), plan.sink_blocks), plan.strips + 1);
    take(plan.strip_shares, product(shares, std::int64_t{plan.block_keys} * (plan.d_qk + plan.d_v)));
  }
  plan.workspace_bytes = static_cast<std::size_t>(total);
  return plan;
}

}  // namespace basin::attention::sm90
