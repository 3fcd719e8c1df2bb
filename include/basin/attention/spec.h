// The vocabulary of attention: what is asked for, over which tensors. No algorithm lives here.
//
// Words and maths are those of docs/sinks.md. Dimensions: b sequences, h_q query heads, h_kv key heads
// (h_q is a multiple of h_kv; query head h reads key head h / (h_q / h_kv)), head sizes d_qk and d_v.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "basin/tensor/view.h"

namespace basin::attention {

/// Which keys a query sees. The query stands at absolute position p, the key at j, both counted from the first
/// key of the sequence: visible when
///   (not causal or j <= p) and (j < sink_tokens or (in window on both sides)),
/// with p = kv_tokens - q_tokens + i for query i (bottom-right alignment; p may be negative).
struct Mask {
  bool causal = true;
  std::int64_t window = 0;         // visible recent keys including self: p - j < window; 0 = unlimited
  std::int64_t window_right = -1;  // j - p <= window_right; -1 = unlimited
  std::int64_t sink_tokens = 0;    // the first sink_tokens keys stay visible (but never beyond `causal`)
};

/// The arithmetic of one attention call, apart from the data.
struct Spec {
  Mask mask;
  double scale = 0.0;    // multiplies q.k; usually 1 / sqrt(d_qk). Must be finite.
  double softcap = 0.0;  // x = softcap * tanh(scale * q.k / softcap); 0 = off
};

/// One sequence of the batch: a range of query rows and its keys.
struct Sequence {
  std::int64_t q_begin = 0;    // first row in q and out
  std::int64_t q_tokens = 0;   // may be 0
  std::int64_t kv_begin = 0;   // first row in k and v; unused when paged
  std::int64_t kv_tokens = 0;  // may be 0, and smaller than q_tokens
  /// Paged keys: [ceil(kv_tokens / page_tokens)] page numbers; position j lies in row j % page_tokens of page
  /// pages[j / page_tokens]. A negative entry marks a page that holds no visible key (it is never read).
  /// Null when keys are contiguous.
  const std::int32_t* pages = nullptr;
};

/// Inputs and outputs of a forward pass. Views carry their own strides; the last dimension must be dense.
struct Forward {
  Spec spec;
  std::span<const Sequence> sequences;  // [b]

  ConstView q;       // [total_q, h_q, d_qk]
  ConstView q_sink;  // same shape, or absent. The second query of in-cache positions: when present, keys
                     // j < sink_tokens are scored with q_sink, all others with q.
  ConstView k;       // [total_kv, h_kv, d_qk], or paged [pages, page_tokens, h_kv, d_qk]
  ConstView v;       // [total_kv, h_kv, d_v],  or paged [pages, page_tokens, h_kv, d_v]
  const float* sink_logit = nullptr;  // [h_q] natural units, joins the denominator unscaled; null = no sink

  View out;                        // [total_q, h_q, d_v]; rows outside every sequence are not touched
  float* lse = nullptr;            // [h_q, total_q] natural log, without the sink; may be null
  float* lse_with_sink = nullptr;  // [h_q, total_q] logaddexp(lse, sink_logit); may be null
};

/// Inputs and outputs of a backward pass: gradients of sum(out * dout) + sum(lse_with_sink * dlse_with_sink).
struct Backward {
  Spec spec;
  std::span<const Sequence> sequences;  // [b]

  ConstView q, q_sink, k, v;          // as in Forward; q_sink is refused (in-cache positions are for serving)
  const float* sink_logit = nullptr;  // [h_q]; may be null
  // What forward returned; both or none, and then computed again. (The reference always computes again.)
  ConstView out;                          // [total_q, h_q, d_v]
  const float* lse_with_sink = nullptr;   // [h_q, total_q]
  ConstView dout;                         // [total_q, h_q, d_v] gradient of out
  const float* dlse_with_sink = nullptr;  // [h_q, total_q] gradient of lse_with_sink; may be null

  View dq;                       // [total_q, h_q, d_qk]
  View dk;                       // as k
  View dv;                       // as v
  float* dsink_logit = nullptr;  // [h_q]; must be null exactly when sink_logit is
};

inline constexpr double kNoSink = -std::numeric_limits<double>::infinity();

}  // namespace basin::attention
