// Rotary position embedding: frequencies of the published variants, and rotation at any int64 position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "basin/base/thread_pool.h"
#include "basin/tensor/view.h"

namespace basin::ops {

enum class RopeType { standard, linear, llama3, yarn };

/// Pairs rotated together: `half` = (i, i + d/2) as in Hugging Face; `interleaved` = (2i, 2i + 1) as in GGUF
/// files of the llama architecture.
enum class RopeLayout { half, interleaved };

struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  std::int64_t rotary_dim = 0;  // even, <= head size
  double factor = 1.0;          // linear, llama3, yarn
  // llama3
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // llama3, yarn
  std::int64_t original_context = 0;
  // yarn
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 0.0;  // 0 = 0.1 ln(factor) + 1 (with mscale / mscale_all_dim as in transformers)
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
  // standard, linear: what each pair's frequency is divided by beside all else; [rotary_dim / 2], or empty
  std::vector<float> divisors;
};

/// Cosines and sines of some positions, times the attention factor. Computed once and used by every layer of a pass.
struct RopeTable {
  std::int64_t tokens = 0;
  std::vector<float> cosine;  // [tokens, rotary_dim / 2]
  std::vector<float> sine;    // [tokens, rotary_dim / 2]
};

/// Frequencies computed once in double. Angles p * f are formed without rounding and reduced before sine and cosine, so
/// position 4,000,000 (and any up to 2^50) is as exact as position 4.
class Rope {
 public:
  /// Throws Error(invalid_argument) naming the field that is out of range.
  Rope(const RopeConfig& config, RopeLayout layout);

  std::span<const double> frequencies() const { return frequencies_; }  // [rotary_dim / 2]
  double attention_factor() const { return attention_factor_; }         // multiplies cosine and sine

  RopeTable table(std::span<const std::int64_t> positions) const;

  /// out[t, h, :] = rotation of x[t, h, :] by the table's position t. x is f32 [tokens, heads, d], out f32, f16 or
  /// bf16 of the same shape (may alias x when f32). Dimensions >= rotary_dim are copied.
  void rotate(ConstView x, const RopeTable& table, View out, ThreadPool& pool) const;

 private:
  std::vector<double> frequencies_;
  double attention_factor_ = 1.0;
  std::int64_t rotary_dim_ = 0;
  RopeLayout layout_ = RopeLayout::half;
};

}  // namespace basin::ops
