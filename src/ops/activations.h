// The inputs of products in the forms that these want.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "basin/base/thread_pool.h"
#include "ops/cpu/kernel.h"

namespace basin::ops {

/// Rows of floats that products share.
struct Rows {
  const float* x;
  std::int64_t x_stride;
  std::int64_t tokens;
  std::int64_t inputs;
};

/// Every form of every input of a call. Memory is the calling thread's, until its next call.
class PreparedInputs {
 public:
  /// The number of what get() gives for these rows once all have been made.
  std::size_t add(const Rows& rows, cpu::Activations form);

  void make(ThreadPool& pool);

  const cpu::Prepared& get(std::size_t number) const { return prepared_[number]; }

  static cpu::Prepared slice(const cpu::Prepared& whole, std::int64_t first, std::int64_t count);

 private:
  std::vector<Rows> rows_;
  std::vector<cpu::Prepared> prepared_;
};

}  // namespace basin::ops
