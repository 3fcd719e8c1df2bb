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

/// What decides where a sequence lies; all on the device of q.
struct Layout {
  const std::optional<Tensor>&q_begin, &kv_begin, &kv_tokens;
  std::int64_t max_q_tokens, max_kv_tokens;
};

attention::Spec spec_of(double scale, double softcap, bool causal, std::int64_t window,
                        std::int64_t window_right, std::int64_t sink_tokens) {
  attention::Spec spec;
  spec.mask = {causal, window, window_right, sink_tokens};
  spec.scale = scale;
  spec.softcap = softcap;
  return spec;
}

/// A problem with its inputs, without its outputs.
attention::cuda::Forward problem_of(const attention::Spec& spec, const Tensor& q, const Tensor& k,
                                    const Tensor& v, const std::optional<Tensor>& sink_logit,
                                    const Layout& layout) {
  attention::cuda::Forward problem;
  problem.spec = spec;
  problem.batch = layout.q_begin ? layout.q_begin->size(0) - 1 : q.size(0);
  problem.max_q_tokens = layout.max_q_tokens;
  problem.max_kv_tokens = layout.max_kv_tokens;
  problem.q = view_as<const void*>(q);
  problem.k = view_as<const void*>(k);
  problem.v = view_as<const void*>(v);
  problem.q_begin = int32_data("q_begin", layout.q_begin, 1);
  problem.kv_begin = int32_data("kv_begin", layout.kv_begin, 1);
  problem.kv_tokens = int32_data("kv_tokens", layout.kv_tokens, 1);
  if (sink_logit) problem.sink_logit = static_cast<const float*>(sink_logit->data_ptr());
  return problem;
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

  attention::cuda::Forward problem =
      problem_of(spec_of(scale, softcap, causal, window, window_right, sink_tokens), q, k, v, sink_logit,
                 {q_begin, kv_begin, kv_tokens, max_q_tokens, max_kv_tokens});
  problem.page_table = int32_data("page_table", page_table, 2);
  if (page_table) problem.page_table_stride = page_table->size(1);
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

/// The tensor, or a copy where the kernels cannot read it: gradients come in any layout, that of a sum has strides of 0.
Tensor readable(const Tensor& tensor) {
  constexpr std::int64_t kStep = 8;  // elements: 16 bytes
  bool as_it_is = reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) <= 1) continue;
    const std::int64_t stride = tensor.stride(i);
    as_it_is = as_it_is && (i == tensor.dim() - 1 ? stride == 1 : stride > 0 && stride % kStep == 0);
  }
  return as_it_is ? tensor : torch::stable::clone(torch::stable::contiguous(tensor));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
    std::optional<Tensor> sink_logit, std::optional<Tensor> q_begin, std::optional<Tensor> kv_begin,
    std::optional<Tensor> kv_tokens, std::int64_t max_q_tokens, std::int64_t max_kv_tokens, double scale,
    double softcap, bool causal, std::int64_t window, std::int64_t window_right, std::int64_t sink_tokens) {
  const torch::stable::accelerator::DeviceGuard device(q.get_device_index());
  q = readable(q);
  k = readable(k);
  v = readable(v);
  out = readable(out);
  dout = readable(dout);
  lse = torch::stable::contiguous(lse);
  if (dlse) dlse = torch::stable::contiguous(*dlse);
  // Rows and keys of no sequence get no gradient.
  const auto gradient = [](const Tensor& of, bool whole) {
    return whole ? torch::stable::new_empty(of, of.sizes()) : torch::stable::new_zeros(of, of.sizes());
  };
  Tensor dq = gradient(q, !q_begin);
  Tensor dk = gradient(k, !kv_begin && !kv_tokens);
  Tensor dv = gradient(v, !kv_begin && !kv_tokens);
  const std::int64_t sinks = sink_logit ? q.size(-2) : 0;
  Tensor dsink = torch::stable::new_zeros(q, {sinks}, ScalarType::Float);

  attention::cuda::Backward problem;
  problem.forward = problem_of(spec_of(scale, softcap, causal, window, window_right, sink_tokens), q, k, v,
                               sink_logit, {q_begin, kv_begin, kv_tokens, max_q_tokens, max_kv_tokens});
  problem.forward.out = view_as<void*>(out);
  problem.forward.lse_with_sink = static_cast<float*>(lse.data_ptr());
  problem.dout = view_as<const void*>(dout);
  if (dlse) problem.dlse_with_sink = static_cast<const float*>(dlse->data_ptr());
  problem.dq = view_as<void*>(dq);
  problem.dk = view_as<void*>(dk);
  problem.dv = view_as<void*>(dv);
  if (sink_logit) problem.dsink_logit = static_cast<float*>(dsink.data_ptr());
  if (problem.forward.batch == 0 || q.numel() + k.numel() == 0) return {dq, dk, dv, dsink};
  if (const std::string reason = attention::cuda::supported(problem); !reason.empty())
    throw Error(ErrorCode::unsupported, reason);

  const auto bytes = static_cast<std::int64_t>(attention::cuda::workspace_bytes(problem));
  const Tensor workspace = torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
  attention::cuda::backward(problem, workspace.data_ptr(), static_cast<std::size_t>(bytes),
                            current_stream(q));
  return {dq, dk, dv, dsink};
}

}  // namespace
}  // namespace basin::pytorch

STABLE_TORCH_LIBRARY_IMPL(basin, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&basin::pytorch::forward));
  m.impl("attention_backward", TORCH_BOX(&basin::pytorch::backward));
}
