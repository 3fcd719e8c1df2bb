// Attention problems whose data depends on (sequence, position, head, element) only, so that the same row can be
// asked for in any chunking, paging and batch and compared bit for bit.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "basin/attention/spec.h"

namespace basin::attention::cpu_tests {

struct Shape {
  DType dtype = DType::bf16;
  DType out_dtype = DType::f32;
  std::int64_t h_q = 6, h_kv = 2, d_qk = 64, d_v = 64;
  Spec spec{};                      // scale 0 = 1 / sqrt(d_qk)
  std::vector<float> sink_logit{};  // [h_q] or empty
  bool q_sink = false;
  float spread = 1.0f;       // queries lie in [-spread, spread]
  float value_scale = 1.0f;  // values lie in [-value_scale, value_scale]
};

/// Some rows of a sequence: the last q_tokens of its first kv_tokens positions.
struct Part {
  std::int64_t sequence = 0;  // selects the data
  std::int64_t q_tokens = 0;
  std::int64_t kv_tokens = 0;
};

struct Layout {
  std::int64_t page_tokens = 0;  // 0 = contiguous
  bool loose = false;            // strides with gaps, and unused rows of q and out between sequences
  // Of loose layouts: elements between heads and between rows, and rows of q between sequences.
  std::int64_t gap = 3, q_gap_rows = 3;
  std::int64_t lead_rows = 0;  // of q before the first sequence, in any layout
};

/// A problem and its memory. Keys no query sees are NaN, pages without a visible key are marked -1 and every unused
/// page is NaN; out and the LSEs start as sentinels.
class Problem {
 public:
  Problem(const Shape& shape, const std::vector<Part>& parts, const Layout& layout);
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const Forward& forward() const { return forward_; }

  /// Element access as float; row counts tokens of all parts in order.
  float out(std::int64_t row, std::int64_t head, std::int64_t d) const;
  float lse(std::int64_t row, std::int64_t head) const;
  float lse_with_sink(std::int64_t row, std::int64_t head) const;
  std::int64_t rows() const { return static_cast<std::int64_t>(token_.size()); }

  /// Everything a row produced, as bits: [rows][h_q (d_v + 2)].
  std::vector<std::vector<std::uint32_t>> bits() const;

  /// The sentinels around and between the rows are still there.
  bool sentinels_intact() const;

  /// Writes one element of k or v of part `part`.
  void set_key(std::size_t part, std::int64_t j, std::int64_t head, std::int64_t d, float value);
  void set_value(std::size_t part, std::int64_t j, std::int64_t head, std::int64_t d, float value);
  void set_query(std::int64_t row, std::int64_t head, std::int64_t d, float value);

 private:
  std::int64_t key_offset(const BasicView<const void*>& view, std::size_t part, std::int64_t j,
                          std::int64_t head) const;

  Shape shape_;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<std::int32_t>> pages_;
  std::vector<std::int64_t> token_;  // [rows] row in q and out
  std::vector<std::byte> q_, q_sink_, k_, v_, out_;
  std::vector<float> lse_, lse_with_sink_;
  Forward forward_;
};

/// bits() of every row of one sequence, computed chunk by chunk with `run`.
std::vector<std::vector<std::uint32_t>> in_chunks(const Shape& shape, std::int64_t sequence,
                                                  std::int64_t tokens, std::int64_t chunk,
                                                  const Layout& layout,
                                                  const std::function<void(const Forward&)>& run);

/// Whether `a` and `b` are the same value or both NaN.
bool same(float a, float b);

/// Largest and root-mean-square difference of two runs of the same problem; infinite where one is NaN.
struct Difference {
  double largest = 0;
  double rms = 0;
  std::int64_t count = 0;  // of values
};
Difference difference(const Problem& a, const Problem& b);

/// Errors of a run of `fast` against the double-precision reference, and those of the yardstick: the reference rerun in
/// the storage's precision.
struct Errors {
  Difference got, allowed;
  double rounding = 0;  // what one output moves by when it is rounded the other way, at most; 0 for f32
  bool sentinels_intact = false;
};
Errors errors(const Shape& shape, const std::vector<Part>& parts, const Layout& layout,
              const std::function<void(const Forward&)>& fast);

float read_element(DType dtype, const std::byte* data, std::int64_t index);
void write_element(DType dtype, std::byte* data, std::int64_t index, float value);

}  // namespace basin::attention::cpu_tests
