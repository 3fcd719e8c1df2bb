#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "attention/cuda/check.h"
#include "attention/cuda/device.h"
#include "attention/cuda/factors.h"
#include "attention/cuda/fill.h"
#include "attention/cuda/sm90/arguments.h"
#include "attention/cuda/sm90/tensor_map.h"
#include "attention/cuda/support.h"
#include "basin/base/error.h"

namespace basin::attention::cuda {
namespace {

void check_supported(const Forward& p) {
  check(p);
  const std::string reason = unsupported_reason(p);
  if (!reason.empty()) throw Error(ErrorCode::unsupported, reason);
}

/// Key rows that one copy brings.
int box_tokens(const Forward& p, const sm90::Plan& plan) {
  return p.page_table == nullptr ? plan.tile_keys
                                 : narrow(std::min<std::int64_t>(p.k.shape[1], plan.tile_keys));
}

sm90::Arguments arguments_of(const Forward& p, const sm90::Shape& shape, const sm90::Plan& plan,
                             void* workspace) {
  sm90::Arguments a;
  a.batch = narrow(p.batch);
  a.h_q = narrow(shape.h_q);
  a.h_kv = narrow(shape.h_kv);
  a.d_v = narrow(shape.d_v);
  a.max_q_tokens = narrow(p.max_q_tokens);
  a.max_kv_tokens = narrow(p.max_kv_tokens);
  const int page_tokens = p.page_table == nullptr ? 1 : narrow(p.k.shape[1]);
  a.page_shift = std::countr_zero(static_cast<unsigned>(page_tokens));
  a.box_shift = std::countr_zero(static_cast<unsigned>(box_tokens(p, plan)));

  a.q_begin = p.q_begin;
  a.kv_begin = p.kv_begin;
  a.kv_tokens = p.kv_tokens;
  a.page_table = p.page_table;
  a.page_table_stride = p.page_table_stride;

  set_mask(p.spec.mask, a);
  a.has_q_sink = p.q_sink ? 1 : 0;

  const Factors factors = factors_of(p.spec);
  a.score_factor = factors.score;
  a.cap_factor = factors.cap;
  a.sink_logit = p.sink_logit;

  const bool dense = p.q_begin == nullptr;
  const auto token = static_cast<std::size_t>(p.out.rank - 3);
  a.out = p.out.data;
  a.out_batch = dense ? p.out.stride[0] : 0;
  a.out_token = p.out.stride[token];
  a.out_head = p.out.stride[token + 1];
  a.writes_lse = p.lse != nullptr || p.lse_with_sink != nullptr;
  a.lse = p.lse;
  a.lse_with_sink = p.lse_with_sink;
  a.lse_head = p.q.shape[token];
  a.lse_batch = dense ? a.lse_head * shape.h_q : 0;

  a.counters = static_cast<std::uint32_t*>(workspace);
  void* after_counters = static_cast<unsigned char*>(workspace) + plan.counter_bytes;
  a.totals = static_cast<float4*>(after_counters);  // one path uses these, the other those
  a.states = static_cast<float*>(after_counters);
  a.block_tokens = plan.block_tokens;
  a.max_blocks = narrow(plan.blocks);
  a.max_segments = narrow(plan.segments);
  if (plan.path == sm90::Path::decode) {
    a.gangs = plan.gangs;
    a.fold_threads = plan.fold_threads;
    a.fold_segments = plan.fold_segments;
  }
  return a;
}

}  // namespace

std::size_t workspace_bytes(const Forward& problem) {
  check_supported(problem);
  return sm90::plan(shape_of(problem), 1).workspace_bytes;  // the same on every device
}

void forward(const Forward& p, void* workspace, std::size_t bytes, CUstream_st* stream) {
  check_supported(p);
  const sm90::Shape shape = shape_of(p);
  const Device device = current_device();
  const sm90::Plan plan = sm90::plan(shape, device.multiprocessors);
  expect_workspace(workspace, bytes, plan.workspace_bytes);
  const std::int64_t total_q = p.q.shape[0] * (p.q.rank == 4 ? p.q.shape[1] : 1);
  if (total_q == 0 || p.max_q_tokens == 0) return;  // there are no rows

  const sm90::Instance instance = sm90::find_instance(plan, shape.dtype, shape.softcap);
  prepare(instance, device);
  sm90::Arguments arguments = arguments_of(p, shape, plan, workspace);
  // A prefill CTA holds rows of one head; the others hold all heads of a group for as many tokens as fit.
  const int q_heads = plan.path == sm90::Path::prefill ? 1 : arguments.h_q / arguments.h_kv;
  CUtensorMap q_map = sm90::tensor_map(p.q, plan.rows / q_heads, q_heads, workspace);
  CUtensorMap q_sink_map =
      p.q_sink ? sm90::tensor_map(p.q_sink, plan.rows / q_heads, q_heads, workspace) : q_map;
  CUtensorMap k_map = sm90::tensor_map(p.k, box_tokens(p, plan), 1, workspace);
  CUtensorMap v_map = sm90::tensor_map(p.v, box_tokens(p, plan), 1, workspace);
  constexpr int kStoredRows = 16;  // a warp's
  CUtensorMap out_map = sm90::tensor_map(p.out, kStoredRows, 1, workspace);
  void* for_prefill[] = {&arguments, &q_map, &k_map, &v_map, &out_map};
  void* for_decode[] = {&arguments, &q_map, &q_sink_map, &k_map, &v_map};

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.ctas));
  config.blockDim = dim3(static_cast<unsigned>(instance.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(instance.shared_bytes);
  config.stream = stream;
  expect_success(cudaLaunchKernelExC(&config, instance.kernel,
                                     plan.path == sm90::Path::prefill ? for_prefill : for_decode),
                 "launching attention");
  if (plan.fold_ctas == 0) return;

  // It starts while the first kernel still runs, and waits there.
  prepare({instance.fold, sm90::kFoldThreads, sm90::kFoldMemory}, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(plan.fold_ctas));
  config.blockDim = dim3(sm90::kFoldThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.fold_bytes);
  config.attrs = &early;
  config.numAttrs = 1;
  void* for_fold[] = {&arguments};
  expect_success(cudaLaunchKernelExC(&config, instance.fold, for_fold), "launching the fold of attention");
}

}  // namespace basin::attention::cuda
