#include "ops/elementwise.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "basin/base/error.h"
#include "ops/cpu/kernel.h"

namespace basin::ops {
namespace {

// Work is handed out in runs of about this many floats: less would cost more to hand out than to do.
constexpr std::int64_t kFloatsPerTask = 16384;

void for_runs(std::int64_t count, std::int64_t run, ThreadPool& pool, const auto& body) {
  run = std::max<std::int64_t>(run, 1);
  pool.parallel_for((count + run - 1) / run,
                    [&](std::int64_t task, int) { body(task * run, std::min(count, (task + 1) * run)); });
}

}  // namespace

void rms_norm(const float* x, std::int64_t x_stride, const float* weight, float eps, float* y,
              std::int64_t y_stride, std::int64_t tokens, std::int64_t width, ThreadPool& pool) {
  for_runs(tokens, kFloatsPerTask / width, pool, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      cpu::kernel().rms_norm(x + t * x_stride, weight, eps, y + t * y_stride, width);
  });
}

void layer_norm(const float* x, std::int64_t x_stride, const float* weight, const float* bias, float eps,
                float* y, std::int64_t y_stride, std::int64_t tokens, std::int64_t width, ThreadPool& pool) {
  for_runs(tokens, kFloatsPerTask / width, pool, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* from = x + t * x_stride;
      float* to = y + t * y_stride;
      double sum = 0.0, squares = 0.0;
      for (std::int64_t i = 0; i < width; ++i) sum += static_cast<double>(from[i]);
      const double mean = sum / static_cast<double>(width);
      for (std::int64_t i = 0; i < width; ++i) {
        const double off = static_cast<double>(from[i]) - mean;
        squares += off * off;
      }
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(eps));
      for (std::int64_t i = 0; i < width; ++i) {
        const auto normal = static_cast<float>((static_cast<double>(from[i]) - mean) * scale);
        to[i] = normal * weight[i] + bias[i];
      }
    }
  });
}

void silu_multiply(const float* gate, const float* up, float* y, std::int64_t tokens, std::int64_t width,
                   ThreadPool& pool) {
  // Runs are multiples of the lane count, so where a run ends does not change a value.
  for_runs(tokens * width, kFloatsPerTask, pool, [&](std::int64_t begin, std::int64_t end) {
    cpu::kernel().silu_multiply(gate + begin, up + begin, y + begin, end - begin);
  });
}

void gelu_multiply(const float* gate, const float* up, float* y, std::int64_t tokens, std::int64_t width,
                   ThreadPool& pool) {
  for_runs(tokens * width, kFloatsPerTask, pool, [&](std::int64_t begin, std::int64_t end) {
    cpu::kernel().gelu_multiply(gate + begin, up + begin, y + begin, end - begin);
  });
}

void swiglu_clamped(const float* gate, const float* up, float limit, float* y, std::int64_t tokens,
                    std::int64_t width, ThreadPool& pool) {
  for_runs(tokens * width, kFloatsPerTask, pool, [&](std::int64_t begin, std::int64_t end) {
    cpu::kernel().swiglu_clamped(gate + begin, up + begin, limit, y + begin, end - begin);
  });
}

void softcap(float* x, float cap, std::int64_t count, ThreadPool& pool) {
  for_runs(count, kFloatsPerTask, pool, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) x[i] = cap * std::tanh(x[i] / cap);
  });
}

void add(float* x, const float* y, std::int64_t count, ThreadPool& pool) {
  for_runs(count, kFloatsPerTask, pool, [&](std::int64_t begin, std::int64_t end) {
    cpu::kernel().add(x + begin, y + begin, end - begin);
  });
}

void negative_log_likelihood(const float* logits, const std::int32_t* target, double* nll,
                             std::int64_t tokens, std::int64_t vocab, ThreadPool& pool) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (target[t] < 0 || target[t] >= vocab) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("target {} of row {} is outside the vocabulary of {}", target[t], t, vocab));
    }
  }
  for_runs(tokens, kFloatsPerTask / vocab, pool, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* row = logits + t * vocab;
      nll[t] = cpu::kernel().log_sum_exp(row, vocab) - static_cast<double>(row[target[t]]);
    }
  });
}

}  // namespace basin::ops
