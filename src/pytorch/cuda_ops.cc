// The operators on Hopper GPUs. Everything is launched on PyTorch's current stream; nothing is read back.
#define USE_CUDA  // declares PyTorch's stream in its stable C interface
#include <torch/csrc/stable/accelerator.h>

#include <limits>
#include <tuple>
#include <vector>

#include "basin/attention/cuda.h"
#include "pytorch/tensors.h"

namespace basin::pytorch {
namespace {

CUstream_st* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<CUstream_st*>(stream);
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sink_logit,
                                   std::optional<Tensor> q_begin, std::optional<Tensor> kv_begin,
                                   std::optional<Tensor> kv_tokens, std::optional<Tensor> page_table,
                                   std::int64_t max_q_tokens, std::int64_t max_kv_tokens, double scale,
                                   double softcap, bool causal, std::int64_t window,
                                   std::int64_t window_right, std::int64_t sink_tokens) {
  const torch::stable::accelerator::DeviceGuard device(q.get_device_index());
  q = dense_last(q);
  k = dense_last(k);
  v = dense_last(v);
  const bool ragged = q.dim() == 3;  // there may be rows of no sequence
  std::vector<std::int64_t> shape(q.sizes().begin(), q.sizes().end());
  shape.back() = v.size(-1);
  Tensor out = ragged ? torch::stable::new_zeros(q, shape) : torch::stable::new_empty(q, shape);
  std::vector<std::int64_t> lse_shape = {q.size(-2), q.size(0)};
  if (!ragged) lse_shape = {q.size(0), q.size(2), q.size(1)};
  Tensor lse = torch::stable::new_empty(q, lse_shape, ScalarType::Float);
  if (ragged) torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());

  attention::cuda::Forward problem;
  problem.spec.mask = {causal, window, window_right, sink_tokens};
  problem.spec.scale = scale;
  problem.spec.softcap = softcap;
  problem.batch = q_begin ? q_begin->size(0) - 1 : q.size(0);
  problem.max_q_tokens = max_q_tokens;
  problem.max_kv_tokens = max_kv_tokens;
  problem.q = view_as<const void*>(q);
  problem.k = view_as<const void*>(k);
  problem.v = view_as<const void*>(v);
  problem.q_begin = int32_data("q_begin", q_begin, 1);
  problem.kv_begin = int32_data("kv_begin", kv_begin, 1);
  problem.kv_tokens = int32_data("kv_tokens", kv_tokens, 1);
  problem.page_table = int32_data("page_table", page_table, 2);
  if (page_table) problem.page_table_stride = page_table->size(1);
  if (sink_logit) problem.sink_logit = static_cast<const float*>(sink_logit->data_ptr());
  problem.out = view_as<void*>(out);
  problem.lse_with_sink = static_cast<float*>(lse.data_ptr());
  if (problem.batch == 0 || out.numel() == 0) return {out, lse};
  if (const std::string reason = attention::cuda::supported(problem); !reason.empty())
    throw Error(ErrorCode::unsupported, reason);

  // Zeroed for every call: calls on several streams never share one, and a captured graph keeps its own.
  const auto bytes = static_cast<std::int64_t>(attention::cuda::workspace_bytes(problem));
  const Tensor workspace = torch::stable::new_zeros(q, {bytes}, ScalarType::Byte);
  attention::cuda::forward(problem, workspace.data_ptr(), static_cast<std::size_t>(bytes), current_stream(q));
  return {out, lse};
}

}  // namespace
}  // namespace basin::pytorch

STABLE_TORCH_LIBRARY_IMPL(basin, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&basin::pytorch::forward));
}
