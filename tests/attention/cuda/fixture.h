// What the device tests share: a device must be there, and the yardstick.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/cuda/problem.h"

namespace basin::attention::cuda_tests {

constexpr DType kStorages[] = {DType::bf16, DType::f16};

/// Head sizes that have kernels, and the keys that their reduction order is anchored at.
struct Heads {
  std::int64_t d_qk, d_v, tile, segment;
};
constexpr Heads kHeads[] = {
    {64, 64, 128, 1024}, {128, 128, 128, 1024}, {192, 128, 128, 2048}, {256, 256, 64, 2048}};
inline std::string text(const Heads& heads) {
  return "d_qk " + std::to_string(heads.d_qk) + ", d_v " + std::to_string(heads.d_v);
}

class CudaTest : public testing::Test {
 protected:
  // (Fails rather than skips: whoever runs these tests wants them run.)
  void SetUp() override {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    ASSERT_TRUE(status == cudaSuccess && devices > 0)
        << "no CUDA device here: " << cudaGetErrorString(status);
  }
};

/// Error against the reference in double: at most twice that of the reference rerun in the precision of the storage.
/// The floor is for problems that the yardstick happens to hit exactly: some steps of fp32, since exp2 and log2 are
/// approximate.
inline void expect_accurate(const Result& got, const Result& want, const Result& yardstick,
                            double floor = 0x1p-20) {
  const auto expect = [floor](const char* what, const std::vector<double>& g, const std::vector<double>& w,
                              const std::vector<double>& y) {
    const Difference error = difference(g, w), allowed = difference(y, w);
    EXPECT_LE(error.rms, 2 * allowed.rms + floor / 4) << what;
    EXPECT_LE(error.largest, 2 * allowed.largest + floor) << what;
  };
  expect("out", got.out, want.out, yardstick.out);
  // A large sum is held to its own size.
  const auto relative = [](std::vector<double> sums, const std::vector<double>& sizes) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (std::isfinite(sizes[i])) sums[i] /= std::max(1.0, std::abs(sizes[i]));
    }
    return sums;
  };
  expect("lse", relative(got.lse, want.lse), relative(want.lse, want.lse), relative(yardstick.lse, want.lse));
  expect("lse_with_sink", relative(got.lse_with_sink, want.lse_with_sink),
         relative(want.lse_with_sink, want.lse_with_sink),
         relative(yardstick.lse_with_sink, want.lse_with_sink));
}

/// Runs the problem and its yardstick; with `rows`, compares those only (the mask must be causal).
inline void expect_accurate(const Problem& problem, const std::vector<std::int64_t>& rows = {},
                            double floor = 0x1p-20) {
  Result got = run(problem);
  const Result want = problem.reference(reference::Precision::f64, rows);
  if (!rows.empty()) {  // the reference left the others at 0
    const std::size_t values = got.out.size() / static_cast<std::size_t>(problem.rows());
    const std::size_t sums = got.lse.size() / static_cast<std::size_t>(problem.rows());
    std::vector<bool> wanted(static_cast<std::size_t>(problem.rows()), false);
    for (const std::int64_t row : rows) wanted[static_cast<std::size_t>(row)] = true;
    for (std::size_t i = 0; i < got.out.size(); ++i) got.out[i] = wanted[i / values] ? got.out[i] : 0;
    for (std::size_t i = 0; i < got.lse.size(); ++i) {
      if (!wanted[i / sums]) got.lse[i] = got.lse_with_sink[i] = 0;
    }
  }
  expect_accurate(got, want, problem.reference(reference::Precision::storage, rows), floor);
}

inline void expect_accurate(const Shape& shape, const std::vector<Part>& parts, const Layout& layout,
                            const std::string& what, double floor = 0x1p-20) {
  SCOPED_TRACE(what);
  expect_accurate(Problem(shape, parts, layout), {}, floor);
}

}  // namespace basin::attention::cuda_tests
