// Every case of golden_dir()/ops, chosen by what its metadata says, through the reference in double, to 1e-12.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/golden_case.h"
#include "attention/problem.h"
#include "attention/reference/element.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"
#include "support/golden.h"

namespace basin::test {
namespace {

namespace reference = attention::reference;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Relative to the largest magnitude, so that values near zero are held to the same absolute size as their neighbours.
void expect_close(const char* what, const std::vector<double>& got, const std::vector<double>& want,
                  double tolerance) {
  double size = 0;
  for (const double x : want) {
    if (std::isfinite(x)) size = std::max(size, std::abs(x));
  }
  EXPECT_LE(max_difference(got, want), tolerance * std::max(size, 1e-300)) << what;
}

class AttentionGolden : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(AttentionGolden, ForwardInDouble) {
  const GoldenCase c(GetParam());
  auto q = c.file.at("q").doubles(), k = c.file.at("k").doubles(), v = c.file.at("v").doubles();
  const auto sink = c.sink() ? c.file.at("sink").doubles() : std::vector<double>();
  std::vector<double> out(index(c.b * c.t_q * c.h_q * c.d_v)), lse(index(c.h_q * c.b * c.t_q)),
      lse_with_sink = lse;
  attention::Forward f;
  f.spec = c.spec;
  f.sequences = c.sequences;
  f.q = contiguous<const void*>(q.data(), DType::f64, {c.b * c.t_q, c.h_q, c.d_qk});
  f.k = contiguous<const void*>(k.data(), DType::f64, {c.b * c.t_kv, c.h_kv, c.d_qk});
  f.v = contiguous<const void*>(v.data(), DType::f64, {c.b * c.t_kv, c.h_kv, c.d_v});
  f.out = contiguous<void*>(out.data(), DType::f64, {c.b * c.t_q, c.h_q, c.d_v});
  attention::check(f);
  reference::Doubles doubles;
  doubles.lse = lse.data();
  doubles.lse_with_sink = lse_with_sink.data();
  if (c.sink()) doubles.sink_logit = sink.data();
  reference::forward(f, reference::Precision::f64, doubles);
  expect_close("out", out, c.file.at("out").doubles(), 1e-12);
  expect_close("lse", c.per_sequence(lse), c.file.at("lse_without_sink").doubles(), 1e-12);
  if (c.file.has("lse_with_sink"))
    expect_close("lse_with_sink", c.per_sequence(lse_with_sink), c.file.at("lse_with_sink").doubles(), 1e-12);
}

TEST_P(AttentionGolden, BackwardInDouble) {
  const GoldenCase c(GetParam());
  auto q = c.file.at("q").doubles(), k = c.file.at("k").doubles(), v = c.file.at("v").doubles();
  auto dout = c.file.at("dout").doubles();
  const auto sink = c.sink() ? c.file.at("sink").doubles() : std::vector<double>();
  std::vector<double> dq(q.size()), dk(k.size()), dv(v.size()), dsink(sink.size());
  attention::Backward f;
  f.spec = c.spec;
  f.sequences = c.sequences;
  f.q = contiguous<const void*>(q.data(), DType::f64, {c.b * c.t_q, c.h_q, c.d_qk});
  f.k = contiguous<const void*>(k.data(), DType::f64, {c.b * c.t_kv, c.h_kv, c.d_qk});
  f.v = contiguous<const void*>(v.data(), DType::f64, {c.b * c.t_kv, c.h_kv, c.d_v});
  f.dout = contiguous<const void*>(dout.data(), DType::f64, {c.b * c.t_q, c.h_q, c.d_v});
  f.dq = contiguous<void*>(dq.data(), DType::f64, {c.b * c.t_q, c.h_q, c.d_qk});
  f.dk = contiguous<void*>(dk.data(), DType::f64, {c.b * c.t_kv, c.h_kv, c.d_qk});
  f.dv = contiguous<void*>(dv.data(), DType::f64, {c.b * c.t_kv, c.h_kv, c.d_v});
  attention::check(f);
  reference::Doubles doubles;
  if (c.sink()) {
    doubles.sink_logit = sink.data();
    doubles.dsink_logit = dsink.data();
  }
  reference::backward(f, doubles);
  expect_close("dq", dq, c.file.at("dq").doubles(), 1e-12);
  expect_close("dk", dk, c.file.at("dk").doubles(), 1e-12);
  expect_close("dv", dv, c.file.at("dv").doubles(), 1e-12);
  if (c.sink()) expect_close("dsink", dsink, c.file.at("dsink").doubles(), 1e-12);
}

// The CPU path on the same case: no worse than twice the reference rerun in its precision.
TEST_P(AttentionGolden, CpuForward) {
  const GoldenCase c(GetParam());
  Problem p;
  p.spec = c.spec;
  p.h_q = c.h_q;
  p.h_kv = c.h_kv;
  p.d_qk = c.d_qk;
  p.d_v = c.d_v;
  for (std::int64_t s = 0; s < c.b; ++s) p.lengths.push_back({c.t_q, c.t_kv});
  p.q = c.file.at("q").doubles();
  p.k = c.file.at("k").doubles();
  p.v = c.file.at("v").doubles();
  if (c.sink()) p.sink_logit = c.file.at("sink").floats();
  const auto want = c.file.at("out").doubles();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Layout layout;
    layout.dtype = layout.out_dtype = dtype;
    const Stored probe(p, layout);
    if (!attention::unsupported_reason(probe.forward, attention::Backend::cpu).empty()) continue;
    const double yardstick = max_difference(run_reference(p, layout, true).out, want);
    for (const std::int64_t page_tokens : {0, 16}) {
      layout.page_tokens = page_tokens;
      layout.hostile = true;
      const Output got = run(p, layout, attention::Backend::cpu);
      EXPECT_LE(max_difference(got.out, want), 2 * yardstick + 1e-6)
          << name(dtype) << " pages of " << page_tokens;
    }
  }
}

// Tensors of a case in a dtype, and what backward makes of them.
struct GoldenGradients {
  std::vector<std::byte> q, k, v, dout, dq, dk, dv;
  std::vector<float> sink, dsink;
  attention::Backward backward;

  GoldenGradients(const GoldenCase& c, DType dtype) {
    const auto place = [&](std::vector<std::byte>& memory, const char* name, std::int64_t rows,
                           std::int64_t heads, std::int64_t d) {
      const std::vector<double> values = c.file.at(name).doubles();
      memory.resize(values.size() * index(block_bytes(dtype)));
      for (std::size_t i = 0; i < values.size(); ++i)
        reference::store(memory.data(), dtype, static_cast<std::int64_t>(i), values[i]);
      return contiguous<void*>(memory.data(), dtype, {rows, heads, d});
    };
    const std::int64_t rows = c.b * c.t_q, keys = c.b * c.t_kv;
    backward.spec = c.spec;
    backward.sequences = c.sequences;
    backward.q = place(q, "q", rows, c.h_q, c.d_qk);
    backward.k = place(k, "k", keys, c.h_kv, c.d_qk);
    backward.v = place(v, "v", keys, c.h_kv, c.d_v);
    backward.dout = place(dout, "dout", rows, c.h_q, c.d_v);
    backward.dq = place(dq, "q", rows, c.h_q, c.d_qk);
    backward.dk = place(dk, "k", keys, c.h_kv, c.d_qk);
    backward.dv = place(dv, "v", keys, c.h_kv, c.d_v);
    if (!c.sink()) return;
    sink = c.file.at("sink").floats();
    dsink.resize(sink.size());
    backward.sink_logit = sink.data();
    backward.dsink_logit = dsink.data();
  }
  GoldenGradients(const GoldenGradients&) = delete;
  GoldenGradients& operator=(const GoldenGradients&) = delete;

  static std::vector<double> values(const std::vector<std::byte>& memory, DType dtype) {
    std::vector<double> result(memory.size() / index(block_bytes(dtype)));
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = reference::load(memory.data(), dtype, static_cast<std::int64_t>(i));
    return result;
  }
};

// The CPU's gradients of the same case: no worse than twice the reference's of tensors rounded likewise, and the rounding of
// the output, which D is made of.
TEST_P(AttentionGolden, CpuBackward) {
  const GoldenCase c(GetParam());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    GoldenGradients yardstick(c, dtype), got(c, dtype);
    if (!attention::unsupported_reason(got.backward, attention::Backend::cpu).empty()) continue;
    reference::backward(yardstick.backward);
    ThreadPool pool(2);
    EXPECT_EQ(attention::backward(got.backward, attention::Backend::cpu, pool).backend, "cpu");
    const double step = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-20;
    const auto expect = [&](const char* what, const std::vector<double>& ours,
                            const std::vector<double>& theirs) {
      const auto want = c.file.at(what).doubles();
      double size = 0;
      for (const double x : want) size = std::max(size, std::abs(x));
      EXPECT_LE(max_difference(ours, want), 2 * max_difference(theirs, want) + step * size)
          << name(dtype) << " " << what;
    };
    const auto floats = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
    expect("dq", got.values(got.dq, dtype), got.values(yardstick.dq, dtype));
    expect("dk", got.values(got.dk, dtype), got.values(yardstick.dk, dtype));
    expect("dv", got.values(got.dv, dtype), got.values(yardstick.dv, dtype));
    if (c.sink()) expect("dsink", floats(got.dsink), floats(yardstick.dsink));
  }
}

INSTANTIATE_TEST_SUITE_P(golden, AttentionGolden, testing::ValuesIn(golden_ops()), golden_name);

TEST(AttentionGoldenFiles, golden_cases_exist) {
  EXPECT_FALSE(golden_ops().empty()) << golden_dir();
}

}  // namespace
}  // namespace basin::test
