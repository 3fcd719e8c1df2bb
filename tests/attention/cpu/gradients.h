// Gradients of attention problems: memory for them, their upstream gradients, and the yardstick.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/cpu/problem.h"
#include "basin/attention/spec.h"

namespace basin::attention::cpu_tests {

/// What gradients start as.
inline constexpr float kGradientSentinel = -12288.0f;

/// The gradients of a problem, laid out as its tensors; dout and dlse depend on (sequence, position, head, element) only, and are NaN
/// outside the sequences.
struct Gradients {
  std::vector<std::byte> dq, dk, dv, dout;
  std::vector<float> dlse, dsink;
  Backward backward;

  /// `dtype`: of dq, dk and dv.
  Gradients(const Problem& problem, const Shape& shape, const std::vector<Part>& parts, DType dtype,
            bool with_dlse = true);
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  double at(const View& view, std::int64_t i) const;
  /// Of one of dq, dk and dv: the rows or keys of sequence s, in order.
  std::vector<double> of_sequence(const View& view, std::size_t s) const;
  /// dq of the rows, dk and dv of the keys of sequence s, in order.
  std::vector<double> of_sequence(std::size_t s) const;
  /// One of dq, dk and dv, of all sequences.
  std::vector<double> of_view(const View& view) const;
  /// Elements outside the sequences that are no sentinels any more. (Contiguous keys only.)
  std::int64_t touched_sentinels() const;
  std::vector<double> all() const;
};

/// The yardstick: plain loops in float, with what a plain implementation stores (O, and the results) rounded to its type. With
/// `rounds_weights` also P and dS, as whoever multiplies them on tensor cores does.
void plain_backward(const Backward& problem, bool rounds_weights = false);

/// Of the difference; infinite where it is NaN.
double root_mean_square(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace basin::attention::cpu_tests
