#include "basin/attention/cuda_c_api.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>

#include "attention/c_boundary.h"
#include "basin/attention/cuda.h"

namespace basin::attention {
namespace {

using namespace c_boundary;

// What a program compiled against this version relies on; new fields go behind the last one.
static_assert(sizeof(basin_attention_cuda_forward_args) == 560);
static_assert(sizeof(basin_attention_cuda_backward_args) == 792);
static_assert(sizeof(basin_attention_cuda_append_args) == 384);

void check_device_index(std::int32_t device_index) {
  if (device_index < 0) refuse(fmt::format("device_index is {}; it must be 0 or more", device_index));
}

void check_place(const basin_attention_spec& spec) {
  if (spec.device != BASIN_DEVICE_CUDA)
    refuse(fmt::format("device is {}; allowed is BASIN_DEVICE_CUDA", spec.device));
  check_device_index(spec.device_index);
  if (spec.backend == BASIN_BACKEND_REFERENCE || spec.backend == BASIN_BACKEND_CPU) {
    throw Error(ErrorCode::unsupported,
                fmt::format("backend {} was asked for; this library has CUDA only",
                            spec.backend == BASIN_BACKEND_CPU ? "cpu" : "reference"),
                "use BASIN_BACKEND_AUTOMATIC, or the library of basin/attention/c_api.h");
  }
  if (spec.backend != BASIN_BACKEND_AUTOMATIC)
    refuse(fmt::format("backend is {}; allowed is BASIN_BACKEND_AUTOMATIC", spec.backend));
}

// What forward and backward are given alike.
template <typename Args>
cuda::Forward inputs_of(const Args* args) {
  check_struct(args);
  check_place(args->spec);
  cuda::Forward problem;
  problem.spec = spec_of(args->spec);
  problem.batch = args->batch;
  problem.max_q_tokens = args->max_q_tokens;
  problem.max_kv_tokens = args->max_kv_tokens;
  problem.q = view_of("q", args->q);
  problem.k = view_of("k", args->k);
  problem.v = view_of("v", args->v);
  problem.q_begin = args->q_begin;
  problem.kv_begin = args->kv_begin;
  problem.kv_tokens = args->kv_tokens;
  problem.sink_logit = args->sink_logit;
  return problem;
}

cuda::Forward problem_of(const basin_attention_cuda_forward_args* args) {
  cuda::Forward problem = inputs_of(args);
  problem.q_sink = optional_view_of("q_sink", args->q_sink);
  problem.page_table = args->page_table;
  problem.page_table_stride = args->page_table_stride;
  problem.out = view_of("out", args->out);
  problem.lse = args->lse;
  problem.lse_with_sink = args->lse_with_sink;
  return problem;
}

cuda::Backward problem_of(const basin_attention_cuda_backward_args* args) {
  cuda::Backward problem;
  problem.forward = inputs_of(args);
  // (Forward's own results, which backward only reads.)
  const ConstView out = view_of("out", args->out);
  problem.forward.out = {const_cast<void*>(out.data), out.dtype, out.rank, out.shape, out.stride};
  problem.forward.lse_with_sink = const_cast<float*>(args->lse_with_sink);
  problem.dout = view_of("dout", args->dout);
  problem.dlse_with_sink = args->dlse_with_sink;
  problem.dq = view_of("dq", args->dq);
  problem.dk = view_of("dk", args->dk);
  problem.dv = view_of("dv", args->dv);
  problem.dsink_logit = args->dsink_logit;
  return problem;
}

cuda::Append problem_of(const basin_attention_cuda_append_args* args) {
  check_struct(args);
  check_device_index(args->device_index);
  if (args->reserved != 0) refuse(fmt::format("reserved is {}; it must be 0", args->reserved));
  cuda::Append problem;
  problem.batch = args->batch;
  problem.new_k = view_of("new_k", args->new_k);
  problem.new_v = view_of("new_v", args->new_v);
  problem.new_begin = args->new_begin;
  problem.k = view_of("k", args->k);
  problem.v = view_of("v", args->v);
  problem.kv_tokens = args->kv_tokens;
  problem.page_table = args->page_table;
  problem.page_table_stride = args->page_table_stride;
  return problem;
}

template <typename Problem>
void require_supported(const Problem& problem) {
  if (const std::string reason = cuda::supported(problem); !reason.empty())
    throw Error(ErrorCode::unsupported, reason);
}

void expect_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error has been told; the next call must not find it
  throw Error(ErrorCode::internal, fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

// Makes a device current, and the thread's own again.
class OnDevice {
 public:
  explicit OnDevice(std::int32_t device_index) {
    int count = 0;
    expect_success(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (device_index >= count)
      refuse(fmt::format("device_index is {}; CUDA sees {} devices", device_index, count));
    expect_success(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device_index) return;
    expect_success(cudaSetDevice(device_index), "cudaSetDevice");
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

CUstream_st* stream_of(void* stream) {
  return static_cast<CUstream_st*>(stream);
}

template <typename Args>
basin_status init_args(Args* args, std::size_t struct_bytes) noexcept {
  return init(args, struct_bytes, [](Args& fresh) {
    set_defaults(fresh.spec);
    fresh.spec.device = BASIN_DEVICE_CUDA;
  });
}

template <typename Args>
basin_status size_of_workspace(const Args* args, std::size_t* bytes) noexcept {
  return guarded([&] {
    need(bytes, "bytes");
    *bytes = 0;
    *bytes = cuda::workspace_bytes(problem_of(args));
  });
}

}  // namespace
}  // namespace basin::attention

using namespace basin::attention;

std::int32_t basin_attention_cuda_abi() noexcept {
  return BASIN_ATTENTION_CUDA_ABI;
}

const char* basin_attention_cuda_error_message() noexcept {
  return c_boundary::last_error.message;
}

const char* basin_attention_cuda_error_hint() noexcept {
  return c_boundary::last_error.hint;
}

basin_status basin_attention_cuda_forward_init(basin_attention_cuda_forward_args* args,
                                               std::size_t struct_bytes) noexcept {
  return init_args(args, struct_bytes);
}

basin_status basin_attention_cuda_backward_init(basin_attention_cuda_backward_args* args,
                                                std::size_t struct_bytes) noexcept {
  return init_args(args, struct_bytes);
}

basin_status basin_attention_cuda_append_init(basin_attention_cuda_append_args* args,
                                              std::size_t struct_bytes) noexcept {
  return c_boundary::init(args, struct_bytes, [](basin_attention_cuda_append_args&) {});
}

basin_status basin_attention_cuda_forward_supported(const basin_attention_cuda_forward_args* args) noexcept {
  return c_boundary::guarded([&] { require_supported(problem_of(args)); });
}

basin_status basin_attention_cuda_backward_supported(
    const basin_attention_cuda_backward_args* args) noexcept {
  return c_boundary::guarded([&] { require_supported(problem_of(args)); });
}

basin_status basin_attention_cuda_append_supported(const basin_attention_cuda_append_args* args) noexcept {
  return c_boundary::guarded([&] { require_supported(problem_of(args)); });
}

basin_status basin_attention_cuda_workspace_bytes(const basin_attention_cuda_forward_args* args,
                                                  std::size_t* bytes) noexcept {
  return size_of_workspace(args, bytes);
}

basin_status basin_attention_cuda_backward_workspace_bytes(const basin_attention_cuda_backward_args* args,
                                                           std::size_t* bytes) noexcept {
  return size_of_workspace(args, bytes);
}

// (What is wrong with the arguments is said before any device is asked for.)
basin_status basin_attention_cuda_forward(const basin_attention_cuda_forward_args* args, void* workspace,
                                          std::size_t workspace_bytes) noexcept {
  return c_boundary::guarded([&] {
    const cuda::Forward problem = problem_of(args);
    require_supported(problem);
    const OnDevice device(args->spec.device_index);
    cuda::forward(problem, workspace, workspace_bytes, stream_of(args->spec.stream));
  });
}

basin_status basin_attention_cuda_backward(const basin_attention_cuda_backward_args* args, void* workspace,
                                           std::size_t workspace_bytes) noexcept {
  return c_boundary::guarded([&] {
    const cuda::Backward problem = problem_of(args);
    require_supported(problem);
    const OnDevice device(args->spec.device_index);
    cuda::backward(problem, workspace, workspace_bytes, stream_of(args->spec.stream));
  });
}

basin_status basin_attention_cuda_append(const basin_attention_cuda_append_args* args) noexcept {
  return c_boundary::guarded([&] {
    const cuda::Append problem = problem_of(args);
    require_supported(problem);
    const OnDevice device(args->device_index);
    cuda::append(problem, stream_of(args->stream));
  });
}
