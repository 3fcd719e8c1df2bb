// The backward pass: error against the reference in double, at most twice that of plain loops in the storage's precision;
// the same bits alone and in any batch, on any number of threads; nothing of what no row sees.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "attention/cpu/fixture.h"
#include "attention/cpu/problem.h"
#include "attention/reference/rows.h"
#include "basin/attention/mask.h"
#include "basin/attention/reference.h"
#include "basin/base/error.h"

namespace basin::attention::cpu_tests {
namespace {

constexpr DType kStorages[] = {DType::f32, DType::f16, DType::bf16};
constexpr float kSentinel = -12288.0f;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// dout or dlse of a place: exact in every storage type, and the same in any batch.
float upstream(std::int64_t sequence, std::int64_t position, std::int64_t head, std::int64_t d) {
  std::uint64_t x = 0x9e3779b97f4a7c15u;
  for (const std::int64_t part : {sequence, position, head, d}) {
    x = (x ^ (static_cast<std::uint64_t>(part) + 0x632be59bd9b4e019u)) * 0xff51afd7ed558ccdu;
    x ^= x >> 31;
  }
  return static_cast<float>(static_cast<int>(x % 129) - 64) / 64.0f;
}

// The gradients of a problem, laid out as its tensors.
struct Gradients {
  std::vector<std::byte> dq, dk, dv, dout;
  std::vector<float> dlse, dsink;
  Backward backward;

  Gradients(const Problem& problem, const Shape& shape, const std::vector<Part>& parts, DType dtype,
            bool with_dlse = true) {
    const Forward& f = problem.forward();
    backward.spec = f.spec;
    backward.sequences = f.sequences;
    backward.q = f.q;
    backward.k = f.k;
    backward.v = f.v;
    backward.sink_logit = f.sink_logit;
    const auto like = [&](std::vector<std::byte>& memory, const ConstView& of, DType type) {
      View view{nullptr, type, of.rank, of.shape, of.stride};
      memory.resize(index(of.shape[0] * of.stride[0] + 16) * index(block_bytes(type)));
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(memory.size()) / block_bytes(type); ++i) {
        if (type != DType::f64) write_element(type, memory.data(), i, kSentinel);
      }
      view.data = memory.data();
      return view;
    };
    backward.dq = like(dq, f.q, dtype);
    backward.dk = like(dk, f.k, dtype);
    backward.dv = like(dv, f.v, dtype);
    const View out = like(dout, f.out, shape.dtype);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(dout.size()) / block_bytes(shape.dtype); ++i)
      write_element(shape.dtype, dout.data(), i, std::numeric_limits<float>::quiet_NaN());
    dlse.assign(index(f.q.shape[0] * shape.h_q), std::numeric_limits<float>::quiet_NaN());
    for (std::size_t s = 0; s < parts.size(); ++s) {
      const Sequence& sequence = f.sequences[s];
      for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
        const std::int64_t p = query_position(sequence, i), row = sequence.q_begin + i;
        for (std::int64_t h = 0; h < shape.h_q; ++h) {
          for (std::int64_t d = 0; d < shape.d_v; ++d) {
            write_element(shape.dtype, dout.data(), row * out.stride[0] + h * out.stride[1] + d,
                          upstream(parts[s].sequence, p, h, d));
          }
          dlse[index(h * f.q.shape[0] + row)] = upstream(parts[s].sequence, p, h, -1);
        }
      }
    }
    backward.dout = out;
    if (with_dlse) backward.dlse_with_sink = dlse.data();
    dsink.assign(index(shape.h_q), kSentinel);
    if (f.sink_logit != nullptr) backward.dsink_logit = dsink.data();
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  double at(const View& view, std::int64_t i) const {
    if (view.dtype == DType::f64) return static_cast<const double*>(view.data)[i];
    return static_cast<double>(read_element(view.dtype, static_cast<const std::byte*>(view.data), i));
  }

  // dq of the rows, dk and dv of the keys of sequence s, in order.
  std::vector<double> of_sequence(std::size_t s) const {
    std::vector<double> all;
    const Sequence& sequence = backward.sequences[s];
    const auto add = [&](const View& view, std::int64_t offset, std::int64_t d) {
      for (std::int64_t c = 0; c < d; ++c) all.push_back(at(view, offset + c));
    };
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      for (std::int64_t h = 0; h < backward.q.shape[1]; ++h)
        add(backward.dq, (sequence.q_begin + i) * backward.dq.stride[0] + h * backward.dq.stride[1],
            backward.q.shape[2]);
    }
    for (const View& view : {backward.dk, backward.dv}) {
      const auto head_axis = index(view.rank - 2);
      for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
        std::int64_t row = (sequence.kv_begin + j) * view.stride[0];
        if (view.rank == 4) {
          const std::int64_t page = sequence.pages[j / view.shape[1]];
          if (page < 0) continue;
          row = page * view.stride[0] + j % view.shape[1] * view.stride[1];
        }
        for (std::int64_t h = 0; h < view.shape[head_axis]; ++h)
          add(view, row + h * view.stride[head_axis], view.shape[head_axis + 1]);
      }
    }
    return all;
  }
  std::vector<double> all() const {
    std::vector<double> result;
    for (std::size_t s = 0; s < backward.sequences.size(); ++s) {
      const std::vector<double> part = of_sequence(s);
      result.insert(result.end(), part.begin(), part.end());
    }
    return result;
  }
};

// The yardstick: plain loops in float, with what a plain implementation stores (O, and the results) rounded to its type.
void plain_backward(const Backward& p) {
  using reference::at;
  using reference::key_at;
  using reference::load;
  const DType storage = p.q.dtype;
  const std::int64_t h_q = p.q.shape[1], d_qk = p.q.shape[2], d_v = p.dout.shape[2];
  const std::int64_t group = h_q / p.k.shape[index(p.k.rank - 2)];
  const auto elements = [](const View& v) { return index(v.shape[0] * v.stride[0]); };
  std::vector<float> dq(elements(p.dq)), dk(elements(p.dk)), dv(elements(p.dv)), dsink(index(h_q));
  const auto scale = static_cast<float>(p.spec.scale), cap = static_cast<float>(p.spec.softcap);
  const auto value = [](const ConstView& v, std::int64_t i) {
    return static_cast<float>(load(v.data, v.dtype, i));
  };
  for (const Sequence& sequence : p.sequences) {
    for (std::int64_t row = 0; row < sequence.q_tokens * h_q; ++row) {
      const std::int64_t h = row % h_q, token = sequence.q_begin + row / h_q;
      const std::int64_t q_at = at(p.q, token, h), dout_at = at(p.dout, token, h), dq_at = at(p.dq, token, h);
      const std::vector<std::int64_t> keys = reference::keys_of(p.spec.mask, sequence, row / h_q);
      std::vector<float> x(keys.size()), dp(keys.size()), out(index(d_v));
      const float sink = p.sink_logit != nullptr ? p.sink_logit[h] : -std::numeric_limits<float>::infinity();
      float top = sink;
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const std::int64_t k_at = key_at(p.k, sequence, keys[n], h / group),
                           v_at = key_at(p.v, sequence, keys[n], h / group);
        for (std::int64_t d = 0; d < d_qk; ++d) x[n] += value(p.q, q_at + d) * value(p.k, k_at + d);
        x[n] *= scale;
        if (cap != 0.0f) x[n] = cap * std::tanh(x[n] / cap);
        top = std::max(top, x[n]);
        for (std::int64_t d = 0; d < d_v; ++d) dp[n] += value(p.dout, dout_at + d) * value(p.v, v_at + d);
      }
      float total = std::exp(sink - top);
      for (const float score : x) total += std::exp(score - top);
      const float lse = top + std::log(total);
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const std::int64_t v_at = key_at(p.v, sequence, keys[n], h / group);
        for (std::int64_t d = 0; d < d_v; ++d) out[index(d)] += std::exp(x[n] - lse) * value(p.v, v_at + d);
      }
      float big_d = p.dlse_with_sink != nullptr ? -p.dlse_with_sink[h * p.q.shape[0] + token] : 0.0f;
      for (std::int64_t d = 0; d < d_v; ++d) {
        double stored = 0;
        reference::store(&stored, storage, 0, static_cast<double>(out[index(d)]));
        big_d += static_cast<float>(load(&stored, storage, 0)) * value(p.dout, dout_at + d);
      }
      dsink[index(h)] -= std::exp(sink - lse) * big_d;
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const float probability = std::exp(x[n] - lse);
        const float slope = cap != 0.0f ? 1.0f - x[n] / cap * (x[n] / cap) : 1.0f;
        const float ds = probability * (dp[n] - big_d) * slope * scale;
        const std::int64_t k_at = key_at(p.k, sequence, keys[n], h / group);
        const std::int64_t dk_at = key_at(p.dk, sequence, keys[n], h / group),
                           dv_at = key_at(p.dv, sequence, keys[n], h / group);
        for (std::int64_t d = 0; d < d_qk; ++d) {
          dq[index(dq_at + d)] += ds * value(p.k, k_at + d);
          dk[index(dk_at + d)] += ds * value(p.q, q_at + d);
        }
        for (std::int64_t d = 0; d < d_v; ++d)
          dv[index(dv_at + d)] += probability * value(p.dout, dout_at + d);
      }
    }
  }
  const auto store = [](const View& view, const std::vector<float>& from) {
    for (std::size_t i = 0; i < from.size(); ++i)
      reference::store(view.data, view.dtype, static_cast<std::int64_t>(i), static_cast<double>(from[i]));
  };
  store(p.dq, dq);
  store(p.dk, dk);
  store(p.dv, dv);
  for (std::int64_t h = 0; p.dsink_logit != nullptr && h < h_q; ++h) p.dsink_logit[h] = dsink[index(h)];
}

double root_mean_square(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = a[i] - b[i];
    if (std::isnan(d)) return std::numeric_limits<double>::infinity();
    sum += d * d;
  }
  return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(a.size(), 1)));
}

class CpuAttentionBackward : public CpuTest {
 protected:
  static void backward_on_cpu(const Backward& problem, ThreadPool& pool) {
    const Ran ran = backward(problem, Backend::cpu, pool);
    ASSERT_EQ(ran.backend, "cpu");
    ASSERT_EQ(ran.target, cpu::target_name());
  }

  static void check(const Shape& shape, const std::vector<Part>& parts, const Layout& layout,
                    const char* what, bool with_dlse = true) {
    SCOPED_TRACE(what);
    const Problem problem(shape, parts, layout);
    Gradients exact(problem, shape, parts, DType::f64, with_dlse);
    reference::backward(exact.backward);
    const std::vector<double> want = exact.all();
    ThreadPool pool(2);
    for (const DType dtype : {DType::f32, shape.dtype}) {
      SCOPED_TRACE(name(dtype));
      Gradients got(problem, shape, parts, dtype, with_dlse), plain(problem, shape, parts, dtype, with_dlse);
      backward_on_cpu(got.backward, pool);
      plain_backward(plain.backward);
      EXPECT_LE(root_mean_square(got.all(), want), 2 * root_mean_square(plain.all(), want) + 0x1p-30);
      for (std::size_t h = 0; h < got.dsink.size() && problem.forward().sink_logit != nullptr; ++h) {
        const auto expected = static_cast<double>(exact.dsink[h]);
        const double allowed = std::abs(static_cast<double>(plain.dsink[h]) - expected);
        // The error of one sum may be anything below its bound: that of rounding O in every row, and a step of the result.
        const double storage = shape.dtype == DType::bf16  ? 0x1p-9
                               : shape.dtype == DType::f16 ? 0x1p-12
                                                           : 0x1p-22;
        EXPECT_NEAR(static_cast<double>(got.dsink[h]), expected,
                    2 * allowed + 8 * storage * (std::abs(expected) + 1));
      }
    }
  }

  static std::vector<Shape> shapes(DType dtype) {
    std::vector<Shape> result(7);
    result[1].spec.mask = {.window = 100};
    result[1].sink_logit = {0.5f, -1.0f, 2.0f};
    result[2].spec.mask = {.window = 90, .sink_tokens = 5};
    result[3].spec.softcap = 2.0;
    result[3].spec.mask = {.window = 700, .sink_tokens = 70};
    result[3].sink_logit = {0.5f, -1.0f, 2.0f};
    result[4].spec.mask = {.causal = false, .window = 20, .window_right = 7};
    result[5].spec.mask = {.causal = false};
    for (Shape& shape : result) {
      shape.dtype = dtype;
      shape.d_qk = 32;
      shape.d_v = 48;
      shape.h_q = 3;
      shape.h_kv = 1;
    }
    result[6].h_q = 4;
    result[6].h_kv = 4;
    return result;
  }
};

TEST_F(CpuAttentionBackward, EveryStorageAndFeature) {
  const std::vector<Part> parts = {{0, 37, 150}, {1, 1, 300}, {2, 5, 3}, {3, 64, 64}, {4, 0, 20}, {5, 4, 0}};
  for (const DType dtype : kStorages) {
    SCOPED_TRACE(name(dtype));
    for (const Shape& shape : shapes(dtype)) {
      check(shape, parts, {}, "contiguous");
      check(shape, parts, {16, true}, "paged, loose strides", false);
    }
  }
}

TEST_F(CpuAttentionBackward, EveryHeadSize) {
  for (const DType dtype : kStorages) {
    for (std::int64_t d = 16; d <= 256; d += 48) {
      SCOPED_TRACE(d);
      Shape shape = shapes(dtype)[1];
      shape.d_qk = d;
      shape.d_v = 272 - d;
      check(shape, {{0, 9, 100}}, {}, "d_qk + d_v = 272");
    }
  }
}

// Rows beyond a chunk, keys beyond a tile: 600 queries of 3 heads are four chunks.
TEST_F(CpuAttentionBackward, LongSequences) {
  for (const Shape& shape : shapes(DType::f32)) check(shape, {{0, 300, 400}}, {}, "long");
  for (const DType dtype : {DType::f16, DType::bf16}) check(shapes(dtype)[2], {{0, 600, 700}}, {}, "longer");
}

TEST_F(CpuAttentionBackward, SinksAtTheExtremes) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<Part> parts = {{0, 20, 30}, {1, 4, 0}};  // rows without a key, too
  for (const DType dtype : kStorages) {
    Shape shape = shapes(dtype)[0];
    for (const std::vector<float>& sinks :
         {std::vector{300.0f, -300.0f, 80.0f}, std::vector{kInf, 0.0f, -kInf}}) {
      shape.sink_logit = sinks;
      const Problem problem(shape, parts, {});
      Gradients exact(problem, shape, parts, DType::f64), got(problem, shape, parts, DType::f32);
      reference::backward(exact.backward);
      ThreadPool pool(2);
      backward_on_cpu(got.backward, pool);
      const double storage = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-20;
      EXPECT_LE(root_mean_square(got.all(), exact.all()), storage);
      for (std::size_t h = 0; h < sinks.size(); ++h)
        EXPECT_NEAR(static_cast<double>(got.dsink[h]), static_cast<double>(exact.dsink[h]), 100 * storage)
            << sinks[h];
    }
  }
}

TEST_F(CpuAttentionBackward, SameBitsAloneAndInAnyBatchAndOnAnyThreads) {
  const std::vector<Part> parts = {{1, 3, 200},   {2, 1, 1300}, {3, 0, 50},
                                   {4, 400, 400}, {5, 2, 0},    {6, 4, 2}};
  for (const DType dtype : kStorages) {
    for (const Shape& shape : shapes(dtype)) {
      const Problem problem(shape, parts, {});
      std::vector<float> dsink;
      for (const int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        Gradients batch(problem, shape, parts, dtype);
        backward_on_cpu(batch.backward, pool);
        if (threads == 1) dsink = batch.dsink;
        EXPECT_EQ(batch.dsink, dsink);
        for (std::size_t s = 0; s < parts.size(); ++s) {
          ThreadPool other(3);
          const Problem one(shape, {parts[s]}, {});
          Gradients alone(one, shape, {parts[s]}, dtype);
          backward_on_cpu(alone.backward, other);
          EXPECT_EQ(alone.of_sequence(0), batch.of_sequence(s)) << threads << " threads, sequence " << s;
        }
      }
    }
  }
}

TEST_F(CpuAttentionBackward, WhatForwardReturnedMayBeGivenAgain) {
  for (const DType dtype : kStorages) {
    Shape shape = shapes(dtype)[3];
    shape.out_dtype = dtype;
    const std::vector<Part> parts = {{1, 70, 200}, {2, 300, 300}};
    ThreadPool pool(2);
    const Problem problem(shape, parts, {});
    run(problem.forward(), pool);
    Gradients again(problem, shape, parts, dtype), given(problem, shape, parts, dtype);
    backward_on_cpu(again.backward, pool);
    given.backward.out = problem.forward().out;
    given.backward.lse_with_sink = problem.forward().lse_with_sink;
    backward_on_cpu(given.backward, pool);
    EXPECT_EQ(given.all(), again.all());
    EXPECT_EQ(given.dsink, again.dsink);
    given.backward.lse_with_sink = nullptr;
    EXPECT_THROW(backward(given.backward, Backend::cpu, pool), Error);
  }
}

// Keys that only later rows see turn NaN: the rows before them, and the keys those see alone, keep their gradients.
TEST_F(CpuAttentionBackward, PoisonedKeysDoNotLeak) {
  for (const DType dtype : kStorages) {
    const Shape shape = shapes(dtype)[0];
    const std::vector<Part> parts = {{1, 100, 100}};
    ThreadPool pool(2);
    const Problem clean(shape, parts, {});
    Problem poisoned(shape, parts, {});
    for (std::int64_t j = 71; j < 100; ++j) {
      for (std::int64_t d = 0; d < shape.d_qk; ++d)
        poisoned.set_key(0, j, 0, d, std::numeric_limits<float>::quiet_NaN());
      for (std::int64_t d = 0; d < shape.d_v; ++d)
        poisoned.set_value(0, j, 0, d, std::numeric_limits<float>::infinity());
    }
    Gradients a(clean, shape, parts, DType::f32), b(poisoned, shape, parts, DType::f32);
    backward_on_cpu(a.backward, pool);
    backward_on_cpu(b.backward, pool);
    const auto rows = [&](const Gradients& g) {
      std::vector<double> all = g.of_sequence(0);
      all.resize(index(71 * shape.h_q * shape.d_qk));
      return all;
    };
    EXPECT_EQ(rows(a), rows(b));
  }
}

TEST_F(CpuAttentionBackward, RefusesWhatItHasNot) {
  Shape shape = shapes(DType::bf16)[0];
  const std::vector<Part> parts = {{0, 3, 5}};
  const Problem problem(shape, parts, {});
  ThreadPool pool(1);
  Gradients g(problem, shape, parts, DType::f64);
  EXPECT_THROW(backward(g.backward, Backend::cpu, pool), Error);
  EXPECT_EQ(backward(g.backward, Backend::automatic, pool).backend, "reference");
}

}  // namespace
}  // namespace basin::attention::cpu_tests
