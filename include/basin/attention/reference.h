// The reference: plain loops that follow the formulas of docs/sinks.md one to one, every feature, forward and backward.
// The forward is the definition used by gpt-oss (a sink column joins the softmax and is dropped after it); the backward
// is the one of FlashAttention PR #1819 and FlashAttention 4: P from lse_with_sink, D = rowsum(dO * O) - dlse_with_sink,
// d_sink_logit = -sum over rows of exp(sink_logit - lse_with_sink) D, without a scale factor.
// It shares spec.h and selection.h with the rest and nothing else, so that a mistake elsewhere cannot hide here.
#pragma once

#include <string>

#include "basin/attention/selection.h"
#include "basin/attention/spec.h"

namespace basin::attention::reference {

/// Arithmetic of a run. f64 is the oracle. f32 and storage are the yardsticks for tolerances: the same loops with
/// every operation rounded to float, and `storage` in addition rounds probabilities to v's dtype and the output to
/// out's dtype.
enum class Precision { f64, f32, storage };

/// Double-precision stand-ins for what Forward and Backward keep in float, so that the oracle can be held to 1e-12.
/// Each may be null: then the float field counts.
struct Doubles {
  const double* sink_logit = nullptr;      // [h_q]
  double* lse = nullptr;                   // [h_q, total_q]
  double* lse_with_sink = nullptr;         // [h_q, total_q]
  const double* dlse_with_sink = nullptr;  // [h_q, total_q]
  double* dsink_logit = nullptr;           // [h_q]
};

/// Any mix of f64, f32, f16 and bf16 views. The problem must have been checked (attention/support.h).
void forward(const Forward& problem, Precision precision = Precision::f64, const Doubles& doubles = {});

/// The same over selected keys.
void forward(const Forward& problem, const Selection& selection, Precision precision = Precision::f64,
             const Doubles& doubles = {});

/// Scores in double, and a full sort by value, then position. Throws Error(invalid_argument) for a NaN.
void select(const Indexer& indexer);

/// Gradients of sum(out * dout) + sum(lse_with_sink * dlse_with_sink), recomputed from q, k, v in double. Writes every row
/// of dq, dk, dv that belongs to a sequence, and dsink_logit. Keys on negative pages get no gradient.
void backward(const Backward& problem, const Doubles& doubles = {});

}  // namespace basin::attention::reference
