// Attention problems for tests: drawn in double, then laid out in any dtype and layout, with hostile bytes around.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "basin/attention/attention.h"

namespace basin::test {

struct Lengths {
  std::int64_t q, kv;
};

/// One problem, free of layout. Values are exact in bf16 and f16 unless a test sets its own, so that every dtype sees the
/// same numbers.
struct Problem {
  attention::Spec spec;
  std::int64_t h_q = 2, h_kv = 1, d_qk = 16, d_v = 16;
  std::vector<Lengths> lengths;
  std::vector<double> q, q_sink;  // [total_q, h_q, d_qk]; q_sink empty = absent
  std::vector<double> k, v;       // [total_kv, h_kv, d]
  std::vector<float> sink_logit;  // [h_q], or empty = none

  std::int64_t total_q() const;
  std::int64_t total_kv() const;
};

/// Fills q, k, v (and q_sink and per-head different sink logits when asked) by a fixed generator.
struct Draw {
  unsigned seed = 1;
  bool sink_logit = true;
  bool q_sink = false;
};
void fill(Problem& problem, const Draw& draw = {});

struct Layout {
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;
  std::int64_t page_tokens = 0;  // 0 = contiguous
  bool hostile = false;  // gaps between rows, heads and sequences; NaN in every byte that no query may see
};

/// What a run produced, in the order of Problem.
struct Output {
  std::vector<double> out;                // [total_q, h_q, d_v]
  std::vector<float> lse, lse_with_sink;  // [h_q, total_q]
};

/// A problem laid out in memory. Not copyable: `forward` points into it.
class Stored {
 public:
  Stored(const Problem& problem, const Layout& layout);
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  attention::Forward forward;

  /// Reads the results and fails the test when a byte outside them has changed.
  Output output() const;

 private:
  void place_keys(const Problem& problem, const Layout& layout);

  const Problem& problem_;
  std::vector<attention::Sequence> sequences_;
  std::vector<std::vector<std::int32_t>> pages_;
  std::vector<std::byte> q_, q_sink_, k_, v_, out_;
  std::vector<float> lse_, lse_with_sink_;
};

/// Lays out, runs and reads.
Output run(const Problem& problem, const Layout& layout, attention::Backend backend, int threads = 2);

/// The reference in double, or the yardstick in lower precision over tensors rounded to `dtype`.
Output run_reference(const Problem& problem, const Layout& layout, bool storage_precision = false);

/// The largest |a - b|; infinite when one is NaN or only one is infinite or the sizes differ.
double max_difference(const std::vector<double>& a, const std::vector<double>& b);
double max_difference(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace basin::test
