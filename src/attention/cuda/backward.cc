#include "attention/cuda/check.h"
#include "attention/cuda/device.h"
#include "attention/cuda/factors.h"
#include "attention/cuda/fill.h"
#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/backward/instances.h"
#include "attention/cuda/sm90/backward/rows.h"
#include "attention/cuda/sm90/tensor_map.h"
#include "attention/cuda/support.h"
#include "basin/base/error.h"

namespace basin::attention::cuda {
namespace {

void check_supported(const Backward& p) {
  if (const std::string reason = supported(p); !reason.empty()) throw Error(ErrorCode::unsupported, reason);
}

sm90::Rows rows_of(const ConstView& view) {
  const auto token = static_cast<std::size_t>(view.rank - 3);
  return {const_cast<void*>(view.data), view.rank == 4 ? view.stride[0] : 0, view.stride[token],
          view.stride[token + 1]};
}

sm90::BackwardArguments arguments_of(const Backward& p, const sm90::BackwardPlan& plan, void* workspace) {
  const Forward& f = p.forward;
  const sm90::Shape shape = shape_of(f);
  sm90::BackwardArguments a;
  a.batch = narrow(f.batch);
  a.h_q = narrow(shape.h_q);
  a.h_kv = narrow(shape.h_kv);
  a.d_qk = narrow(shape.d_qk);
  a.d_v = narrow(shape.d_v);
  a.max_q_tokens = narrow(f.max_q_tokens);
  a.max_kv_tokens = narrow(f.max_kv_tokens);
  a.q_begin = f.q_begin;
  a.kv_begin = f.kv_begin;
  a.kv_tokens = f.kv_tokens;
  set_mask(f.spec.mask, a);
  const Factors factors = factors_of(f.spec);
  a.score_factor = factors.score;
  a.cap_factor = factors.cap;
  a.scale = static_cast<float>(f.spec.scale);
  a.sink_logit = f.sink_logit;

  a.forward_out = rows_of(f.out);
  a.dout = rows_of(p.dout);
  a.forward_lse = f.lse_with_sink;
  a.dlse = p.dlse_with_sink;
  a.lse_head = f.q.shape[static_cast<std::size_t>(f.q.rank - 3)];
  a.lse_batch = f.q_begin == nullptr ? a.lse_head * shape.h_q : 0;
  a.dq = rows_of(p.dq);
  a.dk = rows_of(p.dk);
  a.dv = rows_of(p.dv);
  a.dsink_logit = p.dsink_logit;

  const auto place = [&](const sm90::Buffer& buffer) {
    return buffer.bytes == 0 ? nullptr : static_cast<unsigned char*>(workspace) + buffer.offset;
  };
  a.row_blocks = plan.row_blocks;
  a.sink_blocks = narrow(plan.sink_blocks);
  a.strips = narrow(plan.strips);
  a.strip_shares = reinterpret_cast<float*>(place(plan.strip_shares));
  a.dq_units = 2 * plan.d_qk / sm90::kUnitColumns;
  a.ticket = reinterpret_cast<std::uint32_t*>(place(plan.ticket));
  a.dsink_parts = reinterpret_cast<float*>(place(plan.dsink_parts));
  a.lse2 = reinterpret_cast<float*>(place(plan.lse2));
  a.big_d = reinterpret_cast<float*>(place(plan.big_d));
  a.dq_turns = reinterpret_cast<std::uint32_t*>(place(plan.dq_turns));
  a.dq_sums = reinterpret_cast<float*>(place(plan.dq_sums));
  return a;
}

/// `early`: the grid may start while the one before it in the stream still runs; the kernel says itself what it waits for.
void launch(const void* kernel, dim3 grid, int threads, int shared_bytes, CUstream_st* stream, void** list,
            bool early) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = early ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.attrs = &attribute;
  config.numAttrs = 1;
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  expect_success(cudaLaunchKernelExC(&config, kernel, list), "launching the backward pass of attention");
}

}  // namespace

std::size_t workspace_bytes(const Backward& problem) {
  check_supported(problem);
  return plan_of(problem).workspace_bytes;
}

void backward(const Backward& p, void* workspace, std::size_t bytes, CUstream_st* stream) {
  check_supported(p);
  const Device device = current_device();
  const sm90::BackwardPlan plan = plan_of(p);
  expect_workspace(workspace, bytes, plan.workspace_bytes);
  const Forward& f = p.forward;
  const sm90::Shape shape = shape_of(f);
  const sm90::BackwardInstances instances = sm90::find_backward_instances(plan, shape.dtype, shape.softcap);
  prepare(instances.keys, device);
  if (!plan.sums) prepare(instances.queries, device);

  sm90::BackwardArguments arguments = arguments_of(p, plan, workspace);
  const auto heads = static_cast<unsigned>(arguments.h_q),
             row_blocks = static_cast<unsigned>(plan.row_blocks);
  const auto key_ctas = static_cast<unsigned>(plan.key_ctas),
             query_ctas = static_cast<unsigned>(plan.query_ctas);
  const sm90::RowKernels rows = sm90::row_kernels(shape.dtype == DType::bf16);
  void* for_rows[] = {&arguments};
  // (All maps before the first launch: what the driver refuses is refused whole.)
  struct Maps {
    CUtensorMap q, k, v, dout;
  };
  const auto maps_of = [&](int query_rows, int keys) -> Maps {
    return {sm90::tensor_map(f.q, query_rows, 1, workspace), sm90::tensor_map(f.k, keys, 1, workspace),
            sm90::tensor_map(f.v, keys, 1, workspace), sm90::tensor_map(p.dout, query_rows, 1, workspace)};
  };
  Maps for_keys = maps_of(sm90::backward_tile_rows(plan.d_qk, plan.sums), plan.block_keys);
  Maps for_queries = maps_of(plan.block_rows, plan.tile_keys);
  void* keys_list[] = {&arguments, &for_keys.q, &for_keys.k, &for_keys.v, &for_keys.dout};
  void* queries_list[] = {&arguments, &for_queries.q, &for_queries.k, &for_queries.v, &for_queries.dout};

  const bool has_rows = row_blocks > 0, has_keys = key_ctas > 0;
  if (has_rows) launch(rows.row_sums, dim3(row_blocks * heads), rows.threads, 0, stream, for_rows, false);
  // Keys without queries have gradients, too: zero. So this kernel runs whenever there are keys.
  if (!has_rows && has_keys)  // nobody has set the ticket
    expect_success(cudaMemsetAsync(arguments.ticket, 0, sizeof(std::uint32_t), stream), "cudaMemsetAsync");
  if (has_keys) {
    launch(instances.keys.kernel, dim3(key_ctas), instances.keys.threads, instances.keys.shared_bytes, stream,
           keys_list, has_rows);
  }
  // The kernels that follow need the rows' sums, which are there when the keys' kernel lets them start, and only the last of these
  // three what that kernel writes. They fill the multiprocessors that it leaves.
  if (has_rows && !plan.sums && query_ctas > 0) {
    launch(instances.queries.kernel, dim3(query_ctas), instances.queries.threads,
           instances.queries.shared_bytes, stream, queries_list, has_keys);
  }
  if (p.dsink_logit != nullptr) launch(rows.dsink, dim3(heads), rows.threads, 0, stream, for_rows, has_keys);
  if (has_keys && plan.sink_blocks > 0) {
    const std::int64_t blocks = f.batch * shape.h_kv * plan.sink_blocks;
    const int parts = plan.block_keys / 64 * (plan.d_qk + plan.d_v) / 32;  // 64 keys x 32 columns each
    launch(instances.fold.kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(parts)),
           instances.fold.threads, 0, stream, for_rows, true);
  }
}

}  // namespace basin::attention::cuda
