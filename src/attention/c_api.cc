#include "basin/attention/c_api.h"

#include <fmt/format.h>

#include <mutex>
#include <span>
#include <vector>

#include "attention/c_boundary.h"
#include "basin/attention/attention.h"
#include "basin/attention/support.h"

struct basin_attention_context {
  explicit basin_attention_context(int threads) : pool(threads) {}
  std::mutex mutex;  // the pool runs one range at a time
  basin::ThreadPool pool;
};

namespace basin::attention {
namespace {

using namespace c_boundary;

// What a program compiled against this version relies on; new fields go behind the last one.
static_assert(sizeof(void*) == 8, "the sizes below are those of 64-bit machines");
static_assert(sizeof(basin_tensor) == 80 && sizeof(basin_const_tensor) == 80);
static_assert(sizeof(basin_attention_sequence) == 40 && sizeof(basin_attention_spec) == 64);
static_assert(sizeof(basin_attention_forward_args) == 512 && sizeof(basin_attention_backward_args) == 672);

template <typename Args>
basin_status init_args(Args* args, std::size_t struct_bytes) noexcept {
  return init(args, struct_bytes, [](Args& fresh) { set_defaults(fresh.spec); });
}

Backend backend_of(const basin_attention_spec& spec) {
  if (spec.device == BASIN_DEVICE_CUDA) {
    throw Error(ErrorCode::unsupported, "device cuda was asked for; this library has the CPU only",
                "use BASIN_DEVICE_CPU and host memory, or the library of basin/attention/cuda_c_api.h");
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
    problem.q_sink = optional_view_of("q_sink", args.q_sink);
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
  return c_boundary::last_error.message;
}

const char* basin_error_hint() noexcept {
  return c_boundary::last_error.hint;
}

basin_status basin_attention_context_create(std::int32_t threads,
                                            basin_attention_context** context) noexcept {
  return c_boundary::guarded([&] {
    c_boundary::need(context, "context");
    *context = nullptr;
    *context = new basin_attention_context(threads);
  });
}

void basin_attention_context_destroy(basin_attention_context* context) noexcept {
  delete context;
}

basin_status basin_attention_forward_init(basin_attention_forward_args* args,
                                          std::size_t struct_bytes) noexcept {
  return init_args(args, struct_bytes);
}

basin_status basin_attention_backward_init(basin_attention_backward_args* args,
                                           std::size_t struct_bytes) noexcept {
  return init_args(args, struct_bytes);
}

basin_status basin_attention_forward_supported(const basin_attention_forward_args* args) noexcept {
  return c_boundary::guarded([&] {
    const Call<basin::attention::Forward> call(args);
    require_supported(call.problem, call.backend);
  });
}

basin_status basin_attention_backward_supported(const basin_attention_backward_args* args) noexcept {
  return c_boundary::guarded([&] {
    const Call<basin::attention::Backward> call(args);
    require_supported(call.problem, call.backend);
  });
}

basin_status basin_attention_forward(basin_attention_context* context,
                                     const basin_attention_forward_args* args,
                                     basin_attention_ran* ran) noexcept {
  return c_boundary::guarded([&] {
    c_boundary::need(context, "context");
    const Call<basin::attention::Forward> call(args);
    const std::lock_guard lock(context->mutex);
    report(forward(call.problem, call.backend, context->pool), ran);
  });
}

basin_status basin_attention_backward(basin_attention_context* context,
                                      const basin_attention_backward_args* args,
                                      basin_attention_ran* ran) noexcept {
  return c_boundary::guarded([&] {
    c_boundary::need(context, "context");
    const Call<basin::attention::Backward> call(args);
    const std::lock_guard lock(context->mutex);
    report(backward(call.problem, call.backend, context->pool), ran);
  });
}
