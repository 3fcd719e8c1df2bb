// Attention problems on the device. The data depends on (sequence, position, head, element) only, so that the same row can
// be asked for in any chunking, layout and batch and compared bit for bit.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "basin/attention/cuda.h"
#include "basin/attention/reference.h"
#include "basin/attention/spec.h"
#include "support/device_buffer.h"

namespace basin::attention::cuda_tests {

enum class Kind { q, q_sink, k, v };

/// One number of the data.
using Source = std::function<double(Kind kind, std::int64_t sequence, std::int64_t position,
                                    std::int64_t head, std::int64_t d)>;

/// Uniform in [-1, 1), a hash of the place.
double noise(Kind kind, std::int64_t sequence, std::int64_t position, std::int64_t head, std::int64_t d);

struct Shape {
  DType dtype = DType::bf16;
  std::int64_t h_q = 8, h_kv = 2, d_qk = 64, d_v = 64;
  Spec spec{};                      // scale 0 = 1 / sqrt(d_qk)
  std::vector<float> sink_logit{};  // [h_q] or empty
  bool q_sink = false;
  double spread = 1;      // of the queries, with the default source
  Source source = noise;  // of all data
};

/// Some rows of a sequence: the last q_tokens of its first kv_tokens positions.
struct Part {
  std::int64_t sequence = 0;  // selects the data
  std::int64_t q_tokens = 0;
  std::int64_t kv_tokens = 0;
};

struct Layout {
  std::int64_t page_tokens = 0;  // 0 = contiguous
  bool dense = false;            // one extent for all sequences ([b, s, ..]) where not paged; else ragged
  bool loose = false;            // strides with gaps, and unused rows around and between sequences
  bool shared_keys = false;      // parts of one sequence have their keys in the same memory
};

/// What a run produced, row by row: rows are the tokens of all parts in order.
struct Result {
  std::vector<double> out;                 // [rows, h_q, d_v]
  std::vector<double> lse, lse_with_sink;  // [rows, h_q]
};

/// The bits of every row: h_q (d_v + 2) words each.
using Bits = std::vector<std::vector<std::uint32_t>>;

/// A problem and its memory on the host: every byte that is not a value which the kernel may use is NaN.
class Problem {
 public:
  Problem(const Shape& shape, const std::vector<Part>& parts, const Layout& layout = {});
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  /// The reference in double or as a yardstick, on all cores. With `rows`, only those (the mask must be causal): results of
  /// the others stay 0.
  Result reference(reference::Precision precision, const std::vector<std::int64_t>& rows = {}) const;

  std::int64_t rows() const { return static_cast<std::int64_t>(row_part_.size()); }

 private:
  friend class OnDevice;
  struct Place {
    std::int64_t q_begin = 0;   // first physical row of queries
    std::int64_t kv_begin = 0;  // of keys, when contiguous
    std::vector<std::int32_t> pages{};
  };

  bool used(const Part& part, std::int64_t position) const;
  void place_queries();
  void place_keys();
  void write_keys();
  View rows_view(std::vector<std::byte>& memory, std::int64_t rows, std::int64_t heads, std::int64_t d) const;
  void put(std::vector<std::byte>& memory, std::int64_t at, double value) const;

  Shape shape_;
  std::vector<Part> parts_;
  Layout layout_;
  std::vector<Place> places_;                  // [parts]
  std::vector<std::int64_t> row_part_;         // [rows]
  std::vector<std::int64_t> row_token_;        // [rows] within its part
  std::int64_t q_extent_ = 0, kv_extent_ = 0;  // rows from one sequence to the next, when dense
  std::int64_t max_q_ = 0, max_kv_ = 0;
  std::vector<std::byte> q_, q_sink_, k_, v_;
  View q_view_, q_sink_view_, k_view_, v_view_;  // [rows, heads, d], or [pages, page_tokens, heads, d]
};

/// A problem in device memory.
class OnDevice {
 public:
  explicit OnDevice(const Problem& problem);

  /// Launches with a workspace that all tests share.
  void launch(CUstream_st* stream = nullptr);
  /// Waits, and reads the results. Fails the test when a byte outside them has changed or a counter is not back at zero.
  Bits bits() const;
  Result result() const;
  /// The results start as sentinels again.
  void reset();

  cuda::Forward forward;
  test::DeviceBuffer q, q_sink, k, v, out, lse, lse_with_sink, q_begin, kv_begin, kv_tokens, page_table,
      sink_logit;

 private:
  const Problem& problem_;
  View out_rows_;  // of the host copy: [rows, h_q, d_v]
  std::int64_t out_offset_ = 0;
};

/// Uploads, launches and reads.
Bits run_bits(const Shape& shape, const std::vector<Part>& parts, const Layout& layout = {});
Result run(const Problem& problem);

/// Largest and root-mean-square difference; infinite where one is NaN. With `rows`, of those only.
struct Difference {
  double largest = 0;
  double rms = 0;
};
Difference difference(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace basin::attention::cuda_tests
