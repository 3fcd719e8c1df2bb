#include "ops/linear.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "base/scratch_buffer.h"
#include "basin/base/error.h"
#include "ops/cpu/kernel.h"

namespace basin::ops {
namespace {

using cpu::Activations;

// Panels of few tokens take about the time of reading them, so they are long: the next rows come from memory while some are
// multiplied. The rows of others stay in the nearer caches while many tokens pass over them. Tokens in float, of which a few rows
// at a time ask again and again, should stay there beside them.
constexpr std::int64_t kFewTokens = 64;
constexpr std::int64_t kFewTokensRows = 512;
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

constexpr std::int64_t kForms = 3;

// Activations in every form that some product of the call wants.
class Inputs {
 public:
  Inputs(const float* x, std::int64_t x_stride, std::int64_t tokens, std::int64_t inputs)
      : x_(x), x_stride_(x_stride), tokens_(tokens), inputs_(inputs) {}

  const cpu::Prepared& get(Activations form, ThreadPool& pool) {
    auto& slot = slots_[static_cast<std::size_t>(form)];
    if (!slot) slot = make(form, pool);
    return *slot;
  }

 private:
  cpu::Prepared make(Activations form, ThreadPool& pool) {
    cpu::Prepared to{};
    to.form = form;
    to.tokens = tokens_;
    to.inputs = inputs_;
    to.padded = (inputs_ + 63) / 64 * 64;
    if (form == Activations::f32) {
      to.data = reinterpret_cast<const std::byte*>(x_);
      to.row_bytes = x_stride_ * 4;
      return to;
    }
    thread_local std::array<ScratchBuffer<std::byte>, kForms>
        memory;  // of the calling thread; the pool only fills it
    const std::int64_t blocks = to.padded / cpu::kBlock;
    // An odd number of cache lines: rows a large power of two apart compete for the same few places of the nearest cache.
    constexpr std::int64_t kLine = 64;
    to.row_bytes = (to.padded * (form == Activations::bf16 ? 2 : 1) / kLine | 1) * kLine;
    const std::int64_t factors =
        form == Activations::bf16 ? 0 : tokens_ * blocks * 4;  // a scale and three sums
    std::byte* bytes = memory[static_cast<std::size_t>(form)].at_least(
        static_cast<std::size_t>(tokens_ * to.row_bytes + 4 * factors));
    to.data = bytes;
    to.scale = reinterpret_cast<const float*>(bytes + tokens_ * to.row_bytes);
    to.scaled_sum = to.scale + tokens_ * blocks;
    to.half_sum = reinterpret_cast<const std::int32_t*>(to.scaled_sum + tokens_ * blocks);
    constexpr std::int64_t kTokensPerTask = 32;
    pool.parallel_for((tokens_ + kTokensPerTask - 1) / kTokensPerTask, [&](std::int64_t task, int) {
      cpu::Prepared part =
          slice(to, task * kTokensPerTask, std::min(kTokensPerTask, tokens_ - task * kTokensPerTask));
      cpu::kernel().prepare(x_ + task * kTokensPerTask * x_stride_, x_stride_, part);
    });
    return to;
  }

 public:
  static cpu::Prepared slice(const cpu::Prepared& whole, std::int64_t first, std::int64_t count) {
    cpu::Prepared part = whole;
    part.tokens = count;
    part.data += first * whole.row_bytes;
    if (whole.scale != nullptr) {
      part.scale += first * (whole.padded / cpu::kBlock);
      part.scaled_sum += first * (whole.padded / cpu::kBlock);
      part.half_sum += first * (whole.padded / cpu::kBlock * 2);
    }
    return part;
  }

 private:
  const float* x_;
  std::int64_t x_stride_, tokens_, inputs_;
  std::array<std::optional<cpu::Prepared>, kForms> slots_;
};

struct Task {
  const LinearOutput* output;
  const cpu::Prepared* x;
  std::int64_t row, rows, token, tokens;
};

void run(const Task& task) {
  thread_local ScratchBuffer<float> scratch;
  const WeightMatrix& weight = *task.output->weight;
  cpu::Panel panel{};
  panel.weights = kind(weight.dtype);
  panel.row_bytes = weight.row_bytes();
  panel.weight = weight.data + task.row * panel.row_bytes;
  panel.rows = task.rows;
  panel.bias = task.output->bias == nullptr ? nullptr : task.output->bias + task.row;
  panel.x = Inputs::slice(*task.x, task.token, task.tokens);
  panel.y = task.output->y + task.token * task.output->y_stride + task.row;
  panel.y_stride = task.output->y_stride;
  panel.scratch = scratch.at_least(static_cast<std::size_t>(cpu::scratch_floats(task.x->padded)));
  cpu::kernel().panel(panel);
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

void linear(const float* x, std::int64_t x_stride, std::int64_t tokens, std::span<const LinearOutput> outputs,
            Compute compute, ThreadPool& pool) {
  if (outputs.empty() || tokens <= 0) return;
  const std::int64_t inputs = outputs.front().weight->inputs;
  for (const LinearOutput& output : outputs) {
    check(inputs, output);
    kind(output.weight->dtype);  // refuses unknown dtypes before anything is written
  }
  Inputs prepared(x, x_stride, tokens, inputs);
  // Rows per panel: fewer for small products, so that every thread has several.
  std::int64_t total_rows = 0;
  for (const LinearOutput& output : outputs) total_rows += output.weight->outputs;
  const std::int64_t fair = (total_rows / (4 * pool.threads()) + kPanelRows - 1) / kPanelRows * kPanelRows;
  const std::int64_t panel_rows =
      std::clamp(fair, kPanelRows, tokens <= kFewTokens ? kFewTokensRows : kPanelRows);

  std::vector<Task> tasks;
  for (const LinearOutput& output : outputs) {
    const cpu::Prepared& form_of = prepared.get(form(output.weight->dtype, compute), pool);
    const std::int64_t panel_tokens = form_of.form == Activations::f32 ? kPanelFloatTokens : kPanelTokens;
    for (std::int64_t token = 0; token < tokens; token += panel_tokens) {
      for (std::int64_t row = 0; row < output.weight->outputs; row += panel_rows) {
        tasks.push_back({&output, &form_of, row, std::min(panel_rows, output.weight->outputs - row), token,
                         std::min(panel_tokens, tokens - token)});
      }
    }
  }
  pool.parallel_for(static_cast<std::int64_t>(tasks.size()),
                    [&](std::int64_t i, int) { run(tasks[static_cast<std::size_t>(i)]); });
}

void widen_row(const WeightMatrix& weight, std::int64_t row, float* out) {
  if (row < 0 || row >= weight.outputs) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("row {} of a matrix with {} rows", row, weight.outputs));
  }
  cpu::kernel().widen(kind(weight.dtype), weight.data + row * weight.row_bytes(), weight.inputs, out);
}

}  // namespace basin::ops
