// The backward pass on the device: error against the reference in double at most twice that of plain loops which round as tensor cores
// make one round; equal bits in every run and in any batch; nothing of what belongs to nobody.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "attention/cpu/gradients.h"
#include "attention/cpu/problem.h"
#include "attention/cuda/fixture.h"
#include "basin/base/error.h"
#include "basin/base/thread_pool.h"

namespace basin::attention::cuda_tests {
namespace {

using cpu_tests::Gradients;
using cpu_tests::root_mean_square;
using HostLayout = cpu_tests::Layout;
using HostPart = cpu_tests::Part;
using HostProblem = cpu_tests::Problem;
using HostShape = cpu_tests::Shape;

constexpr float kInf = std::numeric_limits<float>::infinity();

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

std::size_t bytes_of(const ConstView& view) {
  return index(view.shape[0] * view.stride[0] * block_bytes(view.dtype));
}

// A problem of the host and its gradients, on the device. Forward has run.
class BackwardOnDevice {
 public:
  // `dense`: the sequences, which are equally long and lie one behind the other, as one tensor of rank 4.
  BackwardOnDevice(const HostProblem& problem, Gradients& gradients, bool dense = false)
      : gradients_(gradients) {
    const attention::Forward& host = problem.forward();
    const std::int64_t batch = static_cast<std::int64_t>(host.sequences.size());
    cuda::Forward& f = backward.forward;
    f.spec = host.spec;
    f.batch = batch;
    std::vector<std::int32_t> q_begin, kv_begin, kv_tokens;
    for (const Sequence& s : host.sequences) {
      f.max_q_tokens = std::max(f.max_q_tokens, s.q_tokens);
      f.max_kv_tokens = std::max(f.max_kv_tokens, s.kv_tokens);
      q_begin.push_back(static_cast<std::int32_t>(s.q_begin));
      kv_begin.push_back(static_cast<std::int32_t>(s.kv_begin));
      kv_tokens.push_back(static_cast<std::int32_t>(s.kv_tokens));
    }
    f.q = upload(host.q);
    f.k = upload(host.k);
    f.v = upload(host.v);
    backward.dout = upload(gradients.backward.dout);
    out_ = test::DeviceBuffer(bytes_of(gradients.backward.dout));
    f.out = on(out_, gradients.backward.dout);
    dq_ = test::DeviceBuffer(gradients.dq);
    dk_ = test::DeviceBuffer(gradients.dk);
    dv_ = test::DeviceBuffer(gradients.dv);
    backward.dq = on(dq_, gradients.backward.dq);
    backward.dk = on(dk_, gradients.backward.dk);
    backward.dv = on(dv_, gradients.backward.dv);
    const std::int64_t h_q = host.q.shape[1], rows = host.q.shape[0];
    std::vector<float> dlse = gradients.dlse;
    if (dense) {
      for (ConstView* view : {&f.q, &f.k, &f.v, &backward.dout}) as_dense(*view, batch);
      for (View* view : {&f.out, &backward.dq, &backward.dk, &backward.dv}) as_dense(*view, batch);
      const std::int64_t tokens = rows / batch;
      for (std::int64_t i = 0; i < batch; ++i) {
        for (std::int64_t h = 0; h < h_q; ++h) {
          for (std::int64_t t = 0; t < tokens; ++t)
            dlse[index((i * h_q + h) * tokens + t)] = gradients.dlse[index(h * rows + i * tokens + t)];
        }
      }
    } else {
      q_begin.push_back(
          static_cast<std::int32_t>(host.sequences.back().q_begin + host.sequences.back().q_tokens));
      kv_begin.push_back(
          static_cast<std::int32_t>(host.sequences.back().kv_begin + host.sequences.back().kv_tokens));
      q_begin_ = test::DeviceBuffer(q_begin);
      kv_begin_ = test::DeviceBuffer(kv_begin);
      kv_tokens_ = test::DeviceBuffer(kv_tokens);
      f.q_begin = static_cast<const std::int32_t*>(q_begin_.data());
      f.kv_begin = static_cast<const std::int32_t*>(kv_begin_.data());
      f.kv_tokens = static_cast<const std::int32_t*>(kv_tokens_.data());
    }
    lse_ = test::DeviceBuffer(index(h_q * rows) * sizeof(float));
    f.lse_with_sink = static_cast<float*>(lse_.data());
    dlse_ = test::DeviceBuffer(dlse);
    if (gradients.backward.dlse_with_sink != nullptr)
      backward.dlse_with_sink = static_cast<const float*>(dlse_.data());
    if (host.sink_logit != nullptr) {
      sink_logit_ = test::DeviceBuffer(host.sink_logit, index(h_q) * sizeof(float));
      dsink_ = test::DeviceBuffer(gradients.dsink);
      f.sink_logit = static_cast<const float*>(sink_logit_.data());
      backward.dsink_logit = static_cast<float*>(dsink_.data());
    }
    const std::size_t bytes = cuda::workspace_bytes(f);
    const std::vector<std::byte> zeros(bytes);
    const test::DeviceBuffer workspace(zeros);
    cuda::forward(f, workspace.data(), bytes, nullptr);
    test::synchronize_device();
  }

  void launch() {
    const std::size_t bytes = cuda::workspace_bytes(backward);
    if (workspace_.bytes() < bytes) workspace_ = test::DeviceBuffer(bytes);  // of NaN
    cuda::backward(backward, workspace_.data(), bytes, nullptr);
  }

  // Into the gradients.
  void download() {
    test::synchronize_device();
    for (const auto* buffer : {&dq_, &dk_, &dv_, &out_, &lse_, &workspace_})
      EXPECT_TRUE(buffer->guards_intact());
    dq_.download(gradients_.dq.data(), gradients_.dq.size());
    dk_.download(gradients_.dk.data(), gradients_.dk.size());
    dv_.download(gradients_.dv.data(), gradients_.dv.size());
    if (backward.dsink_logit != nullptr) dsink_.download(gradients_.dsink.data(), dsink_.bytes());
  }

  cuda::Backward backward;

 private:
  template <typename Pointer>
  static void as_dense(BasicView<Pointer>& view, std::int64_t batch) {
    const std::int64_t tokens = view.shape[0] / batch;
    view.rank = 4;
    view.shape = {batch, tokens, view.shape[1], view.shape[2]};
    view.stride = {tokens * view.stride[0], view.stride[0], view.stride[1], 1};
  }
  ConstView upload(const ConstView& host) {
    inputs_.emplace_back(host.data, bytes_of(host));
    ConstView view = host;
    view.data = inputs_.back().data();
    return view;
  }
  static View on(const test::DeviceBuffer& buffer, const ConstView& like) {
    return {buffer.data(), like.dtype, like.rank, like.shape, like.stride};
  }

  Gradients& gradients_;
  std::vector<test::DeviceBuffer> inputs_;
  test::DeviceBuffer out_, lse_, dlse_, dq_, dk_, dv_, dsink_, sink_logit_, q_begin_, kv_begin_, kv_tokens_,
      workspace_;
};

// Contiguous keys must be numbers, seen or not.
void fill_keys(HostProblem& problem, const HostShape& shape, const std::vector<HostPart>& parts) {
  for (std::size_t s = 0; s < parts.size(); ++s) {
    const Sequence& sequence = problem.forward().sequences[s];
    for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
      for (std::int64_t h = 0; h < shape.h_kv; ++h) {
        const auto fill = [&](const ConstView& view, std::int64_t d_end, auto set) {
          const auto* bytes = static_cast<const std::byte*>(view.data);
          for (std::int64_t d = 0; d < d_end; ++d) {
            const std::int64_t at = (sequence.kv_begin + j) * view.stride[0] + h * view.stride[1] + d;
            if (std::isnan(cpu_tests::read_element(view.dtype, bytes, at))) set(d);
          }
        };
        fill(problem.forward().k, shape.d_qk, [&](std::int64_t d) { problem.set_key(s, j, h, d, 0.5f); });
        fill(problem.forward().v, shape.d_v, [&](std::int64_t d) { problem.set_value(s, j, h, d, 0.5f); });
      }
    }
  }
}

const std::vector<HostPart> kParts = {{0, 140, 300}, {1, 1, 70}, {2, 9, 4},    {3, 64, 64},
                                      {4, 0, 20},    {5, 4, 0},  {6, 257, 257}};

class CudaAttentionBackward : public CudaTest {
 protected:
  static HostShape shape_of(DType dtype, const Heads& heads) {
    HostShape shape;
    shape.dtype = dtype;
    shape.out_dtype = dtype;
    shape.d_qk = heads.d_qk;
    shape.d_v = heads.d_v;
    shape.h_q = 4;
    shape.h_kv = 2;
    return shape;
  }

  // Adds a case; `run_cases` runs them.
  void check(const HostShape& shape, const std::vector<HostPart>& parts, const HostLayout& layout,
             const std::string& what, bool with_dlse = true, bool dense = false) {
    cases_.push_back({shape, parts, layout,
                      fmt::format("{}, {}, d_qk {}, d_v {}", what, name(shape.dtype), shape.d_qk, shape.d_v),
                      with_dlse, dense});
  }

  // The references are slow, so they are computed side by side.
  void run_cases() {
    struct Computed {
      explicit Computed(const Case& c)
          : problem(c.shape, c.parts, c.layout),
            exact(problem, c.shape, c.parts, DType::f64, c.with_dlse),
            plain(problem, c.shape, c.parts, c.shape.dtype, c.with_dlse) {}
      HostProblem problem;
      Gradients exact, plain;
    };
    std::vector<std::unique_ptr<Computed>> computed(cases_.size());
    ThreadPool pool(0);
    pool.parallel_for(static_cast<std::int64_t>(cases_.size()), [&](std::int64_t i, int) {
      const Case& c = cases_[index(i)];
      computed[index(i)] = std::make_unique<Computed>(c);
      Computed& one = *computed[index(i)];
      fill_keys(one.problem, c.shape, c.parts);
      reference::backward(one.exact.backward);
      cpu_tests::plain_backward(one.plain.backward, true);
    });
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      expect_accurate(cases_[i], computed[i]->problem, computed[i]->exact, computed[i]->plain);
      computed[i].reset();
    }
    cases_.clear();
  }

 private:
  struct Case {
    HostShape shape;
    std::vector<HostPart> parts;
    HostLayout layout;
    std::string what;
    bool with_dlse, dense;
  };

  static void expect_accurate(const Case& c, const HostProblem& problem, const Gradients& exact,
                              const Gradients& plain) {
    SCOPED_TRACE(c.what);
    Gradients got(problem, c.shape, c.parts, c.shape.dtype, c.with_dlse);
    BackwardOnDevice device(problem, got, c.dense);
    device.launch();
    device.download();
    // Each gradient by itself: dq, dk and dv differ in size.
    for (const auto& [name, view_of] : kViews) {
      const auto values = [&, view_of = view_of](const Gradients& g) {
        return g.of_view(view_of(g.backward));
      };
      EXPECT_LE(root_mean_square(values(got), values(exact)),
                2 * root_mean_square(values(plain), values(exact)) + 0x1p-20)
          << name;
    }
    for (std::size_t h = 0; h < got.dsink.size() && got.backward.sink_logit != nullptr; ++h) {
      const auto expected = static_cast<double>(exact.dsink[h]);
      const double allowed = std::abs(static_cast<double>(plain.dsink[h]) - expected);
      const double storage = c.shape.dtype == DType::bf16 ? 0x1p-9 : 0x1p-12;
      EXPECT_NEAR(static_cast<double>(got.dsink[h]), expected,
                  2 * allowed + 8 * storage * (std::abs(expected) + 1));
    }
    EXPECT_EQ(got.touched_sentinels(), 0) << "elements of no sequence were written";
  }

  using ViewOf = const View& (*)(const attention::Backward&);
  static constexpr std::pair<const char*, ViewOf> kViews[] = {
      {"dq", [](const attention::Backward& b) -> const View& { return b.dq; }},
      {"dk", [](const attention::Backward& b) -> const View& { return b.dk; }},
      {"dv", [](const attention::Backward& b) -> const View& { return b.dv; }}};

  std::vector<Case> cases_;
};

TEST_F(CudaAttentionBackward, EveryFeature) {
  for (const DType dtype : kStorages) {
    for (const Heads& heads : kHeads) {
      HostShape shape = shape_of(dtype, heads);
      check(shape, kParts, {}, "causal");
      check(shape, kParts, {.loose = true, .gap = 8, .q_gap_rows = 0}, "causal, loose", false);
      shape.spec.mask = {.causal = false};
      check(shape, kParts, {}, "full");
      shape.sink_logit = {0.5f, -1.0f, 2.0f, 8.0f};
      shape.spec.mask = {};
      check(shape, kParts, {}, "sink logit");
      shape.spec.mask = {.window = 33};
      check(shape, kParts, {}, "window and sink logit");
      check(shape, kParts, {.loose = true, .gap = 8, .q_gap_rows = 0}, "window and sink logit, loose");
      shape.spec.mask = {.causal = false, .window = 20, .window_right = 7};
      check(shape, kParts, {}, "two-sided window");
      shape.spec.mask = {.causal = false, .window_right = 3};
      check(shape, kParts, {}, "window to the right only");
      shape.spec.mask = {.causal = false, .window = 20, .window_right = 7, .sink_tokens = 9};
      check(shape, kParts, {}, "two-sided window and sink tokens");
      shape.spec.mask = {.window = 40, .sink_tokens = 4};
      check(shape, kParts, {}, "window and sink tokens");
      shape.spec.mask = {.window = 50, .sink_tokens = 130};
      check(shape, kParts, {}, "window and many sink tokens");
      shape.spec.mask = {.causal = false, .window_right = 3, .sink_tokens = 150};
      check(shape, kParts, {}, "window to the right and sink tokens");
      shape.spec.mask = {};
      shape.spec.softcap = 3;
      shape.spread = 8;
      check(shape, kParts, {}, "softcap");
      shape.spec.softcap = 2;
      shape.spec.mask = {.window = 100, .sink_tokens = 4};
      check(shape, kParts, {}, "softcap, window, sink tokens");
    }
  }
  run_cases();
}

TEST_F(CudaAttentionBackward, DenseBatches) {
  for (const std::int64_t window : {0, 77}) {
    HostShape shape = shape_of(DType::bf16, kHeads[0]);
    shape.sink_logit = {0.5f, -1.0f, 2.0f, 8.0f};
    shape.spec.mask.window = window;
    check(shape, {{0, 70, 140}, {1, 70, 140}, {2, 70, 140}}, {}, "dense", true, true);
    check(shape, {{0, 200, 130}, {1, 200, 130}}, {}, "dense, more queries than keys", true, true);
  }
  run_cases();
}

// Blocks of rows before the first sequence belong to nobody: they have no share in d_sink, and their dq is not touched.
TEST_F(CudaAttentionBackward, RowsBeforeTheFirstSequence) {
  for (const std::int64_t window : {0, 77}) {
    HostShape shape = shape_of(DType::bf16, kHeads[0]);
    shape.sink_logit = {0.5f, -1.0f, 2.0f, 8.0f};
    shape.spec.mask.window = window;
    for (const std::int64_t rows : {5, 128, 300})
      check(shape, {{0, 140, 200}, {1, 3, 70}}, {.lead_rows = rows}, fmt::format("{} rows", rows));
  }
  run_cases();
}

TEST_F(CudaAttentionBackward, EveryHeadSize) {
  const std::pair<std::int64_t, std::int64_t> sizes[] = {
      {8, 8},     {40, 64}, {64, 40},   {72, 64},   {64, 128}, {8, 128},  {120, 8},
      {136, 128}, {192, 8}, {168, 120}, {192, 136}, {64, 256}, {256, 40}, {200, 200}};
  for (const auto& [d_qk, d_v] : sizes) {
    HostShape shape = shape_of(DType::bf16, {d_qk, d_v, 0, 0});
    shape.sink_logit = {0.5f, -1.0f, 2.0f, 0.0f};
    check(shape, {{0, 140, 200}, {1, 3, 70}}, {.loose = true, .gap = 8, .q_gap_rows = 0},
          fmt::format("d_qk {} d_v {}", d_qk, d_v));
    shape.spec.mask.window = 30;
    check(shape, {{0, 140, 200}}, {}, fmt::format("window, d_qk {} d_v {}", d_qk, d_v));
  }
  run_cases();
}

TEST_F(CudaAttentionBackward, EveryGroupSizeAndTileEdge) {
  for (const std::int64_t group : {1, 3, 5, 8}) {
    HostShape shape = shape_of(DType::f16, kHeads[group % 2]);
    shape.h_kv = 2;
    shape.h_q = 2 * group;
    check(shape, {{0, 130, 190}, {1, 20, 20}}, {}, fmt::format("groups of {}", group));
  }
  for (const Heads& heads : kHeads) {
    for (const std::int64_t n : {1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385}) {
      HostShape shape = shape_of(DType::bf16, heads);
      shape.h_q = 1;
      shape.h_kv = 1;
      shape.sink_logit = {1.0f};
      check(shape, {{0, n, n}, {1, n, 2 * n + 1}}, {}, fmt::format("{} tokens, {}", n, text(heads)));
      shape.spec.mask = {.window = n, .sink_tokens = 2};
      check(shape, {{0, 2 * n, 2 * n}}, {}, fmt::format("window {}, {}", n, text(heads)));
    }
  }
  run_cases();
}

// Rows far behind the sink tokens: several strips of 2,048 rows each, in a batch of unequal lengths.
TEST_F(CudaAttentionBackward, Strips) {
  for (const Heads& heads : kHeads) {
    HostShape shape = shape_of(DType::bf16, heads);
    shape.h_q = 2;
    shape.h_kv = 1;
    shape.sink_logit = {1.0f, -1.0f};
    for (const std::int64_t sinks : {1, 4, 70, 200}) {
      shape.spec.mask = {.window = 40, .sink_tokens = sinks};
      check(shape, {{0, 4200, 4300}, {1, 2100, 2100}, {2, 30, 90}}, {}, fmt::format("{} sink tokens", sinks));
    }
    shape.spec.mask = {.causal = false, .window = 40, .window_right = 5, .sink_tokens = 9};
    check(shape, {{0, 2300, 2300}}, {}, "two-sided");
  }
  run_cases();
}

TEST_F(CudaAttentionBackward, SinksAtTheExtremes) {
  const std::vector<HostPart> parts = {{0, 20, 30}, {1, 4, 0}, {2, 150, 150}};  // rows without a key, too
  for (const Heads& heads : kHeads) {
    for (const std::vector<float>& sinks :
         {std::vector{300.0f, -300.0f, 80.0f, 0.0f}, std::vector{kInf, 0.0f, -kInf, 1.0f}}) {
      HostShape shape = shape_of(DType::bf16, heads);
      shape.sink_logit = sinks;
      HostProblem problem(shape, parts, {});
      fill_keys(problem, shape, parts);
      Gradients exact(problem, shape, parts, DType::f64), got(problem, shape, parts, DType::bf16);
      reference::backward(exact.backward);
      BackwardOnDevice device(problem, got);
      device.launch();
      device.download();
      EXPECT_LE(root_mean_square(got.all(), exact.all()), 0x1p-8);
      for (std::size_t h = 0; h < sinks.size(); ++h)
        EXPECT_NEAR(static_cast<double>(got.dsink[h]), static_cast<double>(exact.dsink[h]),
                    0.01 * (std::abs(static_cast<double>(exact.dsink[h])) + 10))
            << sinks[h];
    }
  }
}

// Twenty runs, alone and in a batch, whatever the workspace held.
TEST_F(CudaAttentionBackward, EqualBits) {
  const std::vector<HostPart> parts = {{1, 3, 200},   {2, 1, 1300}, {3, 0, 50},
                                       {4, 900, 900}, {5, 2, 0},    {6, 300, 700}};
  for (const Heads& heads : kHeads) {
    for (const Mask& mask : {Mask{}, Mask{.window = 100}, Mask{.window = 60, .sink_tokens = 70}}) {
      SCOPED_TRACE(fmt::format("{}, window {}, {} sink tokens", text(heads), mask.window, mask.sink_tokens));
      HostShape shape = shape_of(DType::bf16, heads);
      shape.sink_logit = {0.5f, -1.0f, 2.0f, 8.0f};
      shape.spec.mask = mask;
      HostProblem problem(shape, parts, {});
      fill_keys(problem, shape, parts);
      Gradients batch(problem, shape, parts, DType::bf16), again(problem, shape, parts, DType::bf16);
      BackwardOnDevice device(problem, batch), other(problem, again);
      device.launch();
      device.download();
      for (int run = 0; run < 20; ++run) {
        other.launch();
        other.download();
        ASSERT_EQ(again.dq, batch.dq) << run;
        ASSERT_EQ(again.dk, batch.dk) << run;
        ASSERT_EQ(again.dv, batch.dv) << run;
        ASSERT_EQ(again.dsink, batch.dsink) << run;
      }
      for (std::size_t s = 0; s < parts.size(); ++s) {
        HostProblem one(shape, {parts[s]}, {});
        fill_keys(one, shape, {parts[s]});
        Gradients alone(one, shape, {parts[s]}, DType::bf16);
        BackwardOnDevice alone_device(one, alone);
        alone_device.launch();
        alone_device.download();
        EXPECT_EQ(alone.of_sequence(0), batch.of_sequence(s)) << "sequence " << s;
      }
    }
  }
}

// q = 0 and v = 1: every weight is 1 / (n + e^sink), so that dv of key j is the sum of the weights of the rows that see it.
TEST_F(CudaAttentionBackward, ClosedForm) {
  for (const Heads& heads : kHeads) {
    HostShape shape = shape_of(DType::f16, heads);
    shape.h_q = shape.h_kv = 1;
    shape.spread = 0;
    shape.sink_logit = {2.0f};
    constexpr std::int64_t kTokens = 200;
    const std::vector<HostPart> parts = {{0, kTokens, kTokens}};
    HostProblem problem(shape, parts, {});
    Gradients got(problem, shape, parts, DType::f16, false);
    for (std::int64_t i = 0; i < kTokens; ++i) {
      for (std::int64_t d = 0; d < shape.d_v; ++d) {
        problem.set_value(0, i, 0, d, 1.0f);
        cpu_tests::write_element(DType::f16, got.dout.data(), i * got.backward.dout.stride[0] + d, 1.0f);
      }
    }
    BackwardOnDevice device(problem, got);
    device.launch();
    device.download();
    const double sink = std::exp(2.0);
    double dsink = 0;
    for (std::int64_t i = 0; i < kTokens; ++i) {
      const double n = static_cast<double>(i + 1);
      dsink -= static_cast<double>(shape.d_v) * n * sink / ((n + sink) * (n + sink));
    }
    EXPECT_NEAR(static_cast<double>(got.dsink[0]), dsink, 2e-3 * std::abs(dsink));
    for (std::int64_t j = 0; j < kTokens; ++j) {
      double dv = 0;
      for (std::int64_t i = j; i < kTokens; ++i) dv += 1 / (static_cast<double>(i + 1) + sink);
      EXPECT_NEAR(got.at(got.backward.dv, j * got.backward.dv.stride[0]), dv, 2e-3 * dv + 1e-4) << j;
    }
  }
}

}  // namespace
}  // namespace basin::attention::cuda_tests
