#include "basin/attention/c_api.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "basin/attention/attention.h"
#include "basin/attention/support.h"
#include "basin/base/error.h"

struct basin_attention_context {
  explicit basin_attention_context(int threads) : pool(threads) {}
  std::mutex mutex;  // the pool runs one range at a time
  basin::ThreadPool pool;
};

namespace basin::attention {
namespace {

// What a program compiled against this version relies on; new fields go behind the last one.
static_assert(sizeof(void*) == 8, "the sizes below are those of 64-bit machines");
static_assert(sizeof(basin_tensor) == 80 && sizeof(basin_const_tensor) == 80);
static_assert(sizeof(basin_attention_sequence) == 40 && sizeof(basin_attention_spec) == 64);
static_assert(sizeof(basin_attention_forward_args) == 512 && sizeof(basin_attention_backward_args) == 672);

// Of fixed size: keeping an error must not fail.
struct LastError {
  char message[1024] = "";
  char hint[256] = "";
};
thread_local LastError last_error;

basin_status keep(basin_status status, const char* message, const char* hint) {
  std::snprintf(last_error.message, sizeof last_error.message, "%s", message);
  std::snprintf(last_error.hint, sizeof last_error.hint, "%s", hint);
  return status;
}

basin_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return BASIN_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return BASIN_UNSUPPORTED;
    default:
      return BASIN_INTERNAL;
  }
}

// Runs body, and turns whatever it throws into a status.
template <typename Body>
basin_status guarded(const Body& body) noexcept {
  try {
    body();
    return BASIN_OK;
  } catch (const Error& error) {
    return keep(status_of(error.code()), error.what(), error.hint().c_str());
  } catch (const std::bad_alloc&) {
    return keep(BASIN_OUT_OF_MEMORY, "out of memory", "");
  } catch (const std::exception& error) {
    return keep(BASIN_INTERNAL, error.what(), "");
  } catch (...) {
    return keep(BASIN_INTERNAL, "unknown error", "");
  }
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what);
}

template <typename Pointer>
void need(const Pointer* pointer, const char* name) {
  if (pointer == nullptr) refuse(fmt::format("{} is null", name));
}

// A version that appends fields must go on accepting the smaller struct of this one.
template <typename Args>
void check_size(std::size_t struct_bytes) {
  constexpr std::size_t kMaxStructBytes = 4096;  // beyond it struct_bytes was not set at all
  if (struct_bytes < sizeof(Args) || struct_bytes > kMaxStructBytes) {
    refuse(
        fmt::format("struct_bytes is {}; this library's struct has {} bytes. Set it with the init function",
                    struct_bytes, sizeof(Args)));
  }
}

// A newer caller's fields behind ours may be there, but must not ask for anything.
template <typename Args>
void check_struct(const Args* args) {
  need(args, "args");
  check_size<Args>(args->struct_bytes);
  const auto* bytes = reinterpret_cast<const unsigned char*>(args);
  if (std::any_of(bytes + sizeof(Args), bytes + args->struct_bytes, [](unsigned char b) { return b != 0; })) {
    throw Error(ErrorCode::unsupported, "args has fields set that are newer than this library",
                fmt::format("leave them 0, or use a library newer than {}", BASIN_VERSION));
  }
}

template <typename Args>
basin_status init(Args* args, std::size_t struct_bytes) noexcept {
  return guarded([&] {
    need(args, "args");
    check_size<Args>(struct_bytes);
    std::memset(static_cast<void*>(args), 0, struct_bytes);
    args->struct_bytes = struct_bytes;
    args->spec.causal = 1;
    args->spec.window_right = -1;
  });
}

DType dtype_of(const char* name, std::int32_t dtype) {
  switch (dtype) {
    case BASIN_F64:
      return DType::f64;
    case BASIN_F32:
      return DType::f32;
    case BASIN_F16:
      return DType::f16;
    case BASIN_BF16:
      return DType::bf16;
    default:
      refuse(fmt::format("{} has dtype {}; allowed are BASIN_F64, BASIN_F32, BASIN_F16 and BASIN_BF16", name,
                         dtype));
  }
}

// basin_tensor -> View, basin_const_tensor -> ConstView.
template <typename Tensor>
auto view_of(const char* name, const Tensor& tensor) {
  BasicView<decltype(Tensor::data)> view;
  if (tensor.rank < 0 || tensor.rank > 4)
    refuse(fmt::format("{} has {} dimensions; allowed are 0 to 4", name, tensor.rank));
  if (tensor.data == nullptr && tensor.rank == 0) return view;  // absent
  view.data = tensor.data;
  view.dtype = dtype_of(name, tensor.dtype);
  view.rank = tensor.rank;
  std::copy_n(tensor.shape, tensor.rank, view.shape.begin());
  std::copy_n(tensor.stride, tensor.rank, view.stride.begin());
  return view;
}

Backend backend_of(const basin_attention_spec& spec) {
  if (spec.device == BASIN_DEVICE_CUDA) {
    throw Error(ErrorCode::unsupported, "device cuda was asked for; this library has the CPU only",
                "use BASIN_DEVICE_CPU and host memory");
  }
  if (spec.device != BASIN_DEVICE_CPU)
    refuse(fmt::format("device is {}; allowed is BASIN_DEVICE_CPU", spec.device));
  if (spec.device_index != 0)
    refuse(fmt::format("device_index is {}; on the CPU it is 0", spec.device_index));
  if (spec.stream != nullptr) refuse("stream is set; the CPU has no streams, it must be null");
  switch (spec.backend) {
    case BASIN_BACKEND_AUTOMATIC:
      return Backend::automatic;
    case BASIN_BACKEND_REFERENCE:
      return Backend::reference;
    case BASIN_BACKEND_CPU:
      return Backend::cpu;
    default:
      refuse(fmt::format("backend is {}; allowed are BASIN_BACKEND_AUTOMATIC, _REFERENCE and _CPU",
                         spec.backend));
  }
}

Spec spec_of(const basin_attention_spec& from) {
  if (from.causal != 0 && from.causal != 1)
    refuse(fmt::format("causal is {}; allowed are 0 and 1", from.causal));
  Spec spec;
  spec.mask = {from.causal == 1, from.window, from.window_right, from.sink_tokens};
  spec.scale = from.scale;
  spec.softcap = from.softcap;
  return spec;
}

std::vector<Sequence> sequences_of(const basin_attention_sequence* sequences, std::int64_t count) {
  if (count < 0) refuse(fmt::format("sequence_count is {}; it must be 0 or more", count));
  if (count > 0) need(sequences, "sequences");
  std::vector<Sequence> result;
  result.reserve(static_cast<std::size_t>(count));
  for (const auto& s : std::span(sequences, static_cast<std::size_t>(count)))
    result.push_back({s.q_begin, s.q_tokens, s.kv_begin, s.kv_tokens, s.pages});
  return result;
}

// A checked problem and the memory its sequences lie in.
template <typename Problem>
struct Call {
  Backend backend;
  std::vector<Sequence> sequences;
  Problem problem;

  template <typename Args>
  explicit Call(const Args* args) {
    check_struct(args);
    backend = backend_of(args->spec);
    sequences = sequences_of(args->sequences, args->sequence_count);
    problem.spec = spec_of(args->spec);
    problem.sequences = sequences;
    fill(*args);
    check(problem);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  void fill(const basin_attention_forward_args& args) {
    problem.q = view_of("q", args.q);
    if (args.q_sink.data == nullptr && args.q_sink.rank != 0) refuse("q_sink has a shape, but no data");
    problem.q_sink = view_of("q_sink", args.q_sink);
    problem.k = view_of("k", args.k);
    problem.v = view_of("v", args.v);
    problem.sink_logit = args.sink_logit;
    problem.out = view_of("out", args.out);
    problem.lse = args.lse;
    problem.lse_with_sink = args.lse_with_sink;
  }
  void fill(const basin_attention_backward_args& args) {
    problem.q = view_of("q", args.q);
    problem.k = view_of("k", args.k);
    problem.v = view_of("v", args.v);
    problem.sink_logit = args.sink_logit;
    problem.dout = view_of("dout", args.dout);
    problem.dlse_with_sink = args.dlse_with_sink;
    problem.dq = view_of("dq", args.dq);
    problem.dk = view_of("dk", args.dk);
    problem.dv = view_of("dv", args.dv);
    problem.dsink_logit = args.dsink_logit;
  }
};

void report(const Ran& from, basin_attention_ran* to) {
  if (to != nullptr) *to = {from.backend.data(), from.target.data()};  // literals: they end in a zero
}

}  // namespace
}  // namespace basin::attention

using namespace basin::attention;

const char* basin_version() noexcept {
  return BASIN_VERSION;
}

std::int32_t basin_attention_abi() noexcept {
  return BASIN_ATTENTION_ABI;
}

const char* basin_error_message() noexcept {
  return last_error.message;
}

const char* basin_error_hint() noexcept {
  return last_error.hint;
}

basin_status basin_attention_context_create(std::int32_t threads,
                                            basin_attention_context** context) noexcept {
  return guarded([&] {
    need(context, "context");
    *context = nullptr;
    *context = new basin_attention_context(threads);
  });
}

void basin_attention_context_destroy(basin_attention_context* context) noexcept {
  delete context;
}

basin_status basin_attention_forward_init(basin_attention_forward_args* args,
                                          std::size_t struct_bytes) noexcept {
  return init(args, struct_bytes);
}

basin_status basin_attention_backward_init(basin_attention_backward_args* args,
                                           std::size_t struct_bytes) noexcept {
  return init(args, struct_bytes);
}

basin_status basin_attention_forward_supported(const basin_attention_forward_args* args) noexcept {
  return guarded([&] {
    const Call<basin::attention::Forward> call(args);
    require_supported(call.problem, call.backend);
  });
}

basin_status basin_attention_backward_supported(const basin_attention_backward_args* args) noexcept {
  return guarded([&] {
    const Call<basin::attention::Backward> call(args);
    require_supported(call.problem, call.backend);
  });
}

basin_status basin_attention_forward(basin_attention_context* context,
                                     const basin_attention_forward_args* args,
                                     basin_attention_ran* ran) noexcept {
  return guarded([&] {
    need(context, "context");
    const Call<basin::attention::Forward> call(args);
    const std::lock_guard lock(context->mutex);
    report(forward(call.problem, call.backend, context->pool), ran);
  });
}

basin_status basin_attention_backward(basin_attention_context* context,
                                      const basin_attention_backward_args* args,
                                      basin_attention_ran* ran) noexcept {
  return guarded([&] {
    need(context, "context");
    const Call<basin::attention::Backward> call(args);
    const std::lock_guard lock(context->mutex);
    report(backward(call.problem, call.backend, context->pool), ran);
  });
}
