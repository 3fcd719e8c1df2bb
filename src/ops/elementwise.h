// The small operations between the products: norms, activation, rotation, and the loss. All row by row, with a
// fixed order inside a row, so that batching never changes a token.
#pragma once

#include <cstdint>

#include "basin/base/thread_pool.h"

namespace basin::ops {

/// y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight. y may equal x. Rows are `stride` apart.
void rms_norm(const float* x, std::int64_t x_stride, const float* weight /*[width]*/, float eps, float* y,
              std::int64_t y_stride, std::int64_t tokens, std::int64_t width, ThreadPool& pool);

/// y[t, :] = (x[t, :] - mean) / sqrt(variance + eps) * weight + bias, sums in double. y may equal x.
void layer_norm(const float* x, std::int64_t x_stride, const float* weight /*[width]*/,
                const float* bias /*[width]*/, float eps, float* y, std::int64_t y_stride,
                std::int64_t tokens, std::int64_t width, ThreadPool& pool);

/// y = silu(gate) * up, elementwise over [tokens, width] dense rows; y may equal gate.
void silu_multiply(const float* gate, const float* up, float* y, std::int64_t tokens, std::int64_t width,
                   ThreadPool& pool);

/// y = gelu(gate) * up, as above, with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
void gelu_multiply(const float* gate, const float* up, float* y, std::int64_t tokens, std::int64_t width,
                   ThreadPool& pool);

/// y = g sigmoid(1.702 g) (u + 1), as above, with g = min(gate, limit) and u = up limited to [-limit, limit].
void swiglu_clamped(const float* gate, const float* up, float limit, float* y, std::int64_t tokens,
                    std::int64_t width, ThreadPool& pool);

/// x = cap tanh(x / cap) over `count` elements.
void softcap(float* x, float cap, std::int64_t count, ThreadPool& pool);

/// x += y over `count` elements.
void add(float* x, const float* y, std::int64_t count, ThreadPool& pool);

/// -log softmax(logits[t, :])[target[t]] in natural units, for each row. Joint maximum, double sum of float
/// exponentials in a fixed order. Throws Error(invalid_argument) for a target outside [0, vocab).
void negative_log_likelihood(const float* logits /*[tokens, vocab]*/, const std::int32_t* target /*[tokens]*/,
                             double* nll /*[tokens]*/, std::int64_t tokens, std::int64_t vocab,
                             ThreadPool& pool);

}  // namespace basin::ops
