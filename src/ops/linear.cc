#include "ops/linear.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/scratch_buffer.h"
#include "basin/base/error.h"
#include "ops/activations.h"
#include "ops/cpu/kernel.h"
#include "ops/task_runs.h"

namespace basin::ops {
namespace {

using cpu::Activations;

// Panels of few tokens take about the time of reading them: a thread's lie one behind the other, and what it reads next is fetched
// while one is multiplied; short ones let threads finish together. The rows of others stay in the nearer caches while many tokens pass
// over them. Tokens in float, of which a few rows at a time ask again and again, should stay there beside them.
constexpr std::int64_t kFewTokens = 64;
constexpr std::int64_t kFewTokensRows = 64;
constexpr std::int64_t kFewRows = 16;
constexpr std::int64_t kPanelRows = cpu::kRowsAtOnce;
constexpr std::int64_t kPanelTokens = 512;
constexpr std::int64_t kPanelFloatTokens = 128;

cpu::Weights kind(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return cpu::Weights::f32;
    case DType::f16:
      return cpu::Weights::f16;
    case DType::bf16:
      return cpu::Weights::bf16;
    case DType::q8_0:
      return cpu::Weights::q8_0;
    case DType::q4_0:
      return cpu::Weights::q4_0;
    case DType::q4_1:
      return cpu::Weights::q4_1;
    case DType::q5_0:
      return cpu::Weights::q5_0;
    case DType::q5_1:
      return cpu::Weights::q5_1;
    case DType::q4_k:
      return cpu::Weights::q4_k;
    case DType::q5_k:
      return cpu::Weights::q5_k;
    case DType::q6_k:
      return cpu::Weights::q6_k;
    case DType::mxfp4:
      return cpu::Weights::mxfp4;
    default:
      throw Error(ErrorCode::unsupported,
                  fmt::format("a weight matrix of {} cannot be multiplied", name(dtype)),
                  "supported are f32, f16, bf16, and quantised blocks");
  }
}

Activations form(DType dtype, Compute compute) {
  if (compute == Compute::fp32) return Activations::f32;
  if (is_quantised(dtype)) return Activations::int8;
  if (dtype == DType::bf16 && cpu::kernel().has_bf16_dots) return Activations::bf16;
  return Activations::f32;
}

struct Task {
  const LinearOutput* output;
  std::size_t x;  // of the prepared inputs
  std::int64_t row, rows, token, tokens;

  const std::byte* weight() const { return output->weight->data + row * output->weight->row_bytes(); }
};

// `after` is where the thread reads on.
void run(const Task& task, const cpu::Prepared& x, const std::byte* after) {
  thread_local ScratchBuffer<float> scratch;
  cpu::Panel panel{};
  panel.weights = kind(task.output->weight->dtype);
  panel.row_bytes = task.output->weight->row_bytes();
  panel.weight = task.weight();
  panel.rows = task.rows;
  panel.after = after;
  panel.bias = task.output->bias == nullptr ? nullptr : task.output->bias + task.row;
  panel.x = PreparedInputs::slice(x, task.token, task.tokens);
  panel.y = task.output->y + task.token * task.output->y_stride + task.row;
  panel.y_stride = task.output->y_stride;
  panel.scratch = scratch.at_least(static_cast<std::size_t>(cpu::scratch_floats(x.padded)));
  cpu::kernel().panel(panel);
}

// Rows of a panel of few tokens: fewer where all products together have few.
std::int64_t few_tokens_rows(std::int64_t all_rows, int threads) {
  return all_rows < kFewTokensRows * threads ? kFewRows : kFewTokensRows;
}

// Where a thread begins to read matrices that few tokens are multiplied with; null where there are none.
const std::byte* first_row(std::span<const WeightMatrix* const> matrices, int thread, int threads) {
  std::int64_t rows = 0, all = 0;
  for (const WeightMatrix* matrix : matrices) rows += matrix->outputs;
  const std::int64_t panel_rows = few_tokens_rows(rows, threads);
  const auto panels = [&](const WeightMatrix& matrix) {
    return (matrix.outputs + panel_rows - 1) / panel_rows;
  };
  for (const WeightMatrix* matrix : matrices) all += panels(*matrix);
  std::int64_t panel = TaskRuns::first(all, thread, threads);
  for (const WeightMatrix* matrix : matrices) {
    if (panel < panels(*matrix)) return matrix->data + panel * panel_rows * matrix->row_bytes();
    panel -= panels(*matrix);
  }
  return nullptr;
}

void check(std::int64_t inputs, const LinearOutput& output) {
  const WeightMatrix& w = *output.weight;
  if (w.inputs != inputs) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("products of one input need equal widths; given are {} and {}", inputs, w.inputs));
  }
  if (w.inputs < 1 || w.inputs % block_elements(w.dtype) != 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("a {} weight with {} inputs; they must be a positive multiple of {}",
                            name(w.dtype), w.inputs, block_elements(w.dtype)));
  }
  if (w.outputs < 0 || output.y_stride < w.outputs) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} outputs do not fit into rows {} apart", w.outputs, output.y_stride));
  }
}

}  // namespace

void linear(std::span<const LinearInput> inputs, Compute compute, ThreadPool& pool,
            std::span<const WeightMatrix* const> next) {
  PreparedInputs prepared;
  std::vector<Task> tasks;
  std::int64_t all_rows = 0;
  for (const LinearInput& input : inputs) {
    for (const LinearOutput& output : input.outputs) all_rows += output.weight->outputs;
  }
  for (const LinearInput& input : inputs) {
    if (input.outputs.empty() || input.tokens <= 0) continue;
    const Rows rows{input.x, input.x_stride, input.tokens, input.outputs.front().weight->inputs};
    const std::int64_t panel_rows =
        input.tokens <= kFewTokens ? few_tokens_rows(all_rows, pool.threads()) : kPanelRows;
    for (const LinearOutput& output : input.outputs) {
      check(rows.inputs, output);
      kind(output.weight->dtype);  // refuses unknown dtypes before anything is written
      const Activations form_of = form(output.weight->dtype, compute);
      const std::size_t x = prepared.add(rows, form_of);
      const std::int64_t panel_tokens = form_of == Activations::f32 ? kPanelFloatTokens : kPanelTokens;
      for (std::int64_t token = 0; token < rows.tokens; token += panel_tokens) {
        for (std::int64_t row = 0; row < output.weight->outputs; row += panel_rows) {
          tasks.push_back({&output, x, row, std::min(panel_rows, output.weight->outputs - row), token,
                           std::min(panel_tokens, rows.tokens - token)});
        }
      }
    }
  }
  prepared.make(pool);

  const int threads = pool.threads();
  const std::int64_t count = std::ssize(tasks);
  TaskRuns runs(count, threads);
  pool.parallel_for(threads, [&](std::int64_t, int thread) {
    while (const auto number = runs.take(thread)) {
      const Task& task = tasks[static_cast<std::size_t>(*number)];
      const std::int64_t following = *number + 1;
      const bool reads_on = following < count && following != TaskRuns::first(count, thread + 1, threads);
      const std::byte* after = nullptr;
      if (task.tokens <= kFewTokens)
        after =
            reads_on ? tasks[static_cast<std::size_t>(following)].weight() : first_row(next, thread, threads);
      run(task, prepared.get(task.x), after);
    }
  });
}

void widen_row(const WeightMatrix& weight, std::int64_t row, float* out) {
  if (row < 0 || row >= weight.outputs) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("row {} of a matrix with {} rows", row, weight.outputs));
  }
  cpu::kernel().widen(kind(weight.dtype), weight.data + row * weight.row_bytes(), weight.inputs, out);
}

}  // namespace basin::ops
