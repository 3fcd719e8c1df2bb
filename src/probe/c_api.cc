#include "probe/c_api.h"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "basin/attention/attention.h"
#include "basin/attention/support.h"
#include "basin/base/error.h"
#include "probe/layer_arrays.h"

struct basin_probe_result {
  basin::probe::LayerProfile profile;
  std::vector<std::int64_t> numbers;
  std::vector<float> row_error;
  std::vector<basin_probe_array> arrays;
};

namespace basin::probe {
namespace {

thread_local char last_error[1024] = "";

DType dtype_of(std::int32_t dtype) {
  switch (dtype) {
    case BASIN_PROBE_F32:
      return DType::f32;
    case BASIN_PROBE_F16:
      return DType::f16;
    case BASIN_PROBE_BF16:
      return DType::bf16;
    default:
      throw Error(ErrorCode::invalid_argument, fmt::format("dtype {}; allowed are f32, f16 and bf16", dtype));
  }
}

void check(const basin_probe_args* args) {
  const auto refuse = [](const std::string& what) { throw Error(ErrorCode::invalid_argument, what); };
  if (args == nullptr || args->struct_bytes != sizeof(basin_probe_args))
    refuse("arguments of another version");
  if (args->q == nullptr || args->k == nullptr) refuse("q and k are needed");
  if (args->tokens < 1) refuse("q and k have no tokens");
  if (args->topk < 0 || args->topk > args->tokens)
    refuse(fmt::format("topk is {} of {} tokens", args->topk, args->tokens));
}

template <typename T>
void add(basin_probe_result& to, const char* name, const std::vector<T>& values, const ArrayShape& shape) {
  basin_probe_array array{};
  array.name = name;
  array.data = values.data();
  array.kind = std::is_same_v<T, float> ? 0 : std::is_same_v<T, std::int64_t> ? 1 : 2;
  array.rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) array.shape[i] = shape[i];
  to.arrays.push_back(array);
}

std::unique_ptr<basin_probe_result> run(const basin_probe_args* args) {
  check(args);
  ThreadPool pool(args->threads);
  const DType dtype = dtype_of(args->dtype);
  attention::Sequence sequence;
  sequence.q_tokens = sequence.kv_tokens = args->tokens;
  attention::Forward problem;
  problem.spec.mask = {true, args->window, -1, args->sink_tokens};
  problem.spec.scale = args->scale;
  problem.spec.softcap = args->softcap;
  problem.sequences = {&sequence, 1};
  problem.q = contiguous(args->q, dtype, {args->tokens, args->heads, args->d});
  problem.k = problem.v = contiguous(args->k, dtype, {args->tokens, args->kv_heads, args->d});
  problem.sink_logit = args->sink_logit;
  // Only the log-sum-exps are wanted, so any values do.
  const auto rows = static_cast<std::size_t>(args->tokens * args->heads);
  std::vector<float> out(rows * static_cast<std::size_t>(args->d)), lse(rows), lse_with_sink(rows);
  problem.out = contiguous(static_cast<void*>(out.data()), DType::f32, {args->tokens, args->heads, args->d});
  problem.lse = lse.data();
  problem.lse_with_sink = lse_with_sink.data();
  attention::forward(problem, attention::Backend::cpu, pool);

  auto result = std::make_unique<basin_probe_result>();
  LayerOptions options;
  options.map_bins = args->map_bins;
  options.topk = args->topk;
  result->profile = profile(problem, options, pool);
  const LayerProfile& p = result->profile;
  result->numbers = profile_numbers(p);
  result->row_error = {static_cast<float>(p.largest_row_error)};
  add(*result, "numbers", result->numbers, {static_cast<std::int64_t>(result->numbers.size())});
  add(*result, "sink_counts", p.sink_counts, {static_cast<std::int64_t>(p.sink_counts.size())});
  add(*result, "windows", p.windows, {static_cast<std::int64_t>(p.windows.size())});
  add(*result, "row_error", result->row_error, {1});
  each_profile_array(p, [&](const char* name, const std::vector<float>& values, const ArrayShape& shape) {
    add(*result, name, values, shape);
  });
  if (p.topk_width > 0) {
    add(*result, "topk", p.topk, {p.tokens, p.topk_width});
    add(*result, "topk_mass", p.topk_mass, {p.tokens});
  }
  return result;
}

}  // namespace
}  // namespace basin::probe

extern "C" {

int32_t basin_probe_abi(void) {
  return BASIN_PROBE_ABI;
}

const char* basin_probe_error(void) {
  return basin::probe::last_error;
}

basin_probe_result* basin_probe_attention(const basin_probe_args* args) {
  const char* what = "unknown error";
  try {
    return basin::probe::run(args).release();
  } catch (const std::exception& error) {
    std::snprintf(basin::probe::last_error, sizeof basin::probe::last_error, "%s", error.what());
    return nullptr;
  } catch (...) {
    std::snprintf(basin::probe::last_error, sizeof basin::probe::last_error, "%s", what);
    return nullptr;
  }
}

int32_t basin_probe_result_array(const basin_probe_result* result, int32_t index, basin_probe_array* array) {
  if (result == nullptr || array == nullptr || index < 0 ||
      index >= static_cast<int32_t>(result->arrays.size()))
    return 0;
  *array = result->arrays[static_cast<std::size_t>(index)];
  return 1;
}

void basin_probe_result_free(basin_probe_result* result) {
  delete result;
}

}  // extern "C"
