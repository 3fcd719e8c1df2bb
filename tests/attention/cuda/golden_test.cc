// The cases of golden_dir()/ops that the device supports: no worse than twice the reference rerun in its precision.
#include "attention/cuda/fixture.h"
#include "attention/golden_case.h"

namespace basin::attention::cuda_tests {
namespace {

class CudaAttentionGolden : public CudaTest, public testing::WithParamInterface<std::filesystem::path> {};

TEST_P(CudaAttentionGolden, Forward) {
  const test::GoldenCase c(GetParam());
  const auto q = c.file.at("q").doubles(), k = c.file.at("k").doubles(), v = c.file.at("v").doubles();
  const auto want = c.file.at("out").doubles(), want_lse = c.file.at("lse_without_sink").doubles();
  Shape shape;
  shape.spec = c.spec;
  shape.h_q = c.h_q;
  shape.h_kv = c.h_kv;
  shape.d_qk = c.d_qk;
  shape.d_v = c.d_v;
  if (c.sink()) shape.sink_logit = c.file.at("sink").floats();
  shape.source = [&](Kind kind, std::int64_t s, std::int64_t position, std::int64_t h, std::int64_t d) {
    const auto at = [&](std::int64_t rows, std::int64_t row, std::int64_t heads, std::int64_t columns) {
      return static_cast<std::size_t>(((s * rows + row) * heads + h) * columns + d);
    };
    if (kind == Kind::q) return q[at(c.t_q, position - (c.t_kv - c.t_q), c.h_q, c.d_qk)];
    return kind == Kind::k ? k[at(c.t_kv, position, c.h_kv, c.d_qk)] : v[at(c.t_kv, position, c.h_kv, c.d_v)];
  };
  std::vector<Part> parts;
  for (std::int64_t s = 0; s < c.b; ++s) parts.push_back({s, c.t_q, c.t_kv});
  // [b, t_q, h_q] of ours from [b, h_q, t_q] of the file.
  std::vector<double> lse_by_row;
  for (std::int64_t s = 0; s < c.b; ++s) {
    for (std::int64_t i = 0; i < c.t_q; ++i) {
      for (std::int64_t h = 0; h < c.h_q; ++h)
        lse_by_row.push_back(want_lse[static_cast<std::size_t>((s * c.h_q + h) * c.t_q + i)]);
    }
  }
  for (const DType dtype : kStorages) {
    for (const std::int64_t page_tokens : {0, 16}) {
      for (const bool dense : {false, true}) {
        shape.dtype = dtype;
        const Problem problem(shape, parts, {.page_tokens = page_tokens, .dense = dense, .loose = true});
        OnDevice device(problem);
        if (const std::string reason = cuda::supported(device.forward); !reason.empty())
          GTEST_SKIP() << reason;
        device.launch();
        const Result got = device.result();
        const Result yardstick = problem.reference(reference::Precision::storage);
        EXPECT_LE(difference(got.out, want).largest, 2 * difference(yardstick.out, want).largest + 1e-6);
        EXPECT_LE(difference(got.lse, lse_by_row).largest,
                  2 * difference(yardstick.lse, lse_by_row).largest + 1e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(golden, CudaAttentionGolden, testing::ValuesIn(test::golden_ops()),
                         test::golden_name);

}  // namespace
}  // namespace basin::attention::cuda_tests
