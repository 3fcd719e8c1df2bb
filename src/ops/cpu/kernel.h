// What a compiled target offers to ops: plain structs of pointers in, results out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/kernel_words.h"

namespace basin::ops::cpu {

inline constexpr int kBlock = 32;       // elements of a block of int8 activations
inline constexpr int kRowsAtOnce = 32;  // panels of a multiple of this many rows are multiplied fastest

enum class Weights { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, mxfp4 };

/// Form of the activations of one product.
enum class Activations {
  f32,   // as given
  bf16,  // rounded to nearest even
  int8,  // blocks of 32 with a float scale
};

/// Activations in the form a product wants, made once per call and shared by its products. Rows are `row_bytes` apart.
struct Prepared {
  Activations form;
  std::int64_t tokens;
  std::int64_t inputs;    // as given
  std::int64_t padded;    // inputs rounded up to 64; what is beyond `inputs` is zero
  const std::byte* data;  // [tokens] rows of float, bf16 or int8
  std::int64_t row_bytes;
  const float* scale;            // int8: [tokens, padded / 32]
  const float* scaled_sum;       // int8: [tokens, padded / 32] scale * sum of the block
  const std::int32_t* half_sum;  // int8: [tokens, padded / 16] sums of sixteen
};

/// y[t, r] for rows [0, rows) and tokens [0, tokens) of one panel.
struct Panel {
  Weights weights;
  const std::byte* weight;  // first row of the panel
  std::int64_t row_bytes;
  std::int64_t rows;
  const std::byte* after;  // what is read next, where few tokens are multiplied, else null
  const float* bias;       // [rows], may be null
  Prepared x;              // data, scale and the sums point at the panel's first token
  float* y;                // [tokens, rows], rows y_stride apart
  std::int64_t y_stride;
  float* scratch;  // scratch_floats(inputs) floats, 64-byte aligned
};

struct Kernel {
  bool has_bf16_dots;

  /// Converts `tokens` rows of x. data, scale and the sums of `to` are written (const is cast away by the kernel).
  void (*prepare)(const float* x, std::int64_t x_stride, const Prepared& to);

  void (*panel)(const Panel& panel);

  /// One weight row widened to float, exact: out[inputs].
  void (*widen)(Weights weights, const std::byte* row, std::int64_t inputs, float* out);

  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, std::int64_t width);
  void (*silu_multiply)(const float* gate, const float* up, float* y, std::int64_t count);
  void (*gelu_multiply)(const float* gate, const float* up, float* y, std::int64_t count);
  void (*swiglu_clamped)(const float* gate, const float* up, float limit, float* y, std::int64_t count);
  void (*add)(float* x, const float* y, std::int64_t count);

  /// log(sum exp(x - max)) + max over `count` floats, sums of 1024 in float lanes, those in double.
  double (*log_sum_exp)(const float* x, std::int64_t count);
};

/// Floats of scratch a panel needs: kRowsAtOnce rows unpacked, to two bytes an element or one and two scales and an offset for
/// each 32, and a copy of up to sixteen stored ones; widened rows take less.
constexpr std::int64_t scratch_floats(std::int64_t padded_inputs) {
  return kRowsAtOnce * padded_inputs / 2 + 8 * padded_inputs;
}

Kernel kernel(generic::Target);
Kernel kernel(avx2::Target);
Kernel kernel(avx512_bf16::Target);
Kernel kernel(amx::Target);

/// The kernels of the target that this process runs.
const Kernel& kernel();

}  // namespace basin::ops::cpu
