#include "attention/cpu/gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/reference/rows.h"
#include "basin/attention/mask.h"

namespace basin::attention::cpu_tests {
namespace {

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

}  // namespace

Gradients::Gradients(const Problem& problem, const Shape& shape, const std::vector<Part>& parts, DType dtype,
                     bool with_dlse) {
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
      if (type != DType::f64) write_element(type, memory.data(), i, kGradientSentinel);
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
  dsink.assign(index(shape.h_q), kGradientSentinel);
  if (f.sink_logit != nullptr) backward.dsink_logit = dsink.data();
}

double Gradients::at(const View& view, std::int64_t i) const {
  if (view.dtype == DType::f64) return static_cast<const double*>(view.data)[i];
  return static_cast<double>(read_element(view.dtype, static_cast<const std::byte*>(view.data), i));
}

std::vector<double> Gradients::of_sequence(const View& view, std::size_t s) const {
  std::vector<double> all;
  const Sequence& sequence = backward.sequences[s];
  const auto add = [&](std::int64_t offset, std::int64_t d) {
    for (std::int64_t c = 0; c < d; ++c) all.push_back(at(view, offset + c));
  };
  if (view.data == backward.dq.data) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h)
        add((sequence.q_begin + i) * view.stride[0] + h * view.stride[1], view.shape[2]);
    }
    return all;
  }
  const auto head_axis = index(view.rank - 2);
  for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
    std::int64_t row = (sequence.kv_begin + j) * view.stride[0];
    if (view.rank == 4) {
      const std::int64_t page = sequence.pages[j / view.shape[1]];
      if (page < 0) continue;
      row = page * view.stride[0] + j % view.shape[1] * view.stride[1];
    }
    for (std::int64_t h = 0; h < view.shape[head_axis]; ++h)
      add(row + h * view.stride[head_axis], view.shape[head_axis + 1]);
  }
  return all;
}

std::vector<double> Gradients::of_sequence(std::size_t s) const {
  std::vector<double> all;
  for (const View& view : {backward.dq, backward.dk, backward.dv}) {
    const std::vector<double> part = of_sequence(view, s);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::vector<double> Gradients::of_view(const View& view) const {
  std::vector<double> all;
  for (std::size_t s = 0; s < backward.sequences.size(); ++s) {
    const std::vector<double> part = of_sequence(view, s);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::int64_t Gradients::touched_sentinels() const {
  std::int64_t touched = 0;
  for (const View& view : {backward.dq, backward.dk, backward.dv}) {
    // What is left of the untouched memory when the elements of the sequences are taken out.
    const bool rows = view.data == backward.dq.data;
    std::vector<bool> owned(index(view.shape[0] * view.stride[0]), false);
    for (const Sequence& sequence : backward.sequences) {
      const std::int64_t begin = rows ? sequence.q_begin : sequence.kv_begin;
      const std::int64_t count = rows ? sequence.q_tokens : sequence.kv_tokens;
      for (std::int64_t i = begin; i < begin + count; ++i) {
        for (std::int64_t h = 0; h < view.shape[1]; ++h) {
          const std::int64_t first = i * view.stride[0] + h * view.stride[1];
          std::fill_n(owned.begin() + first, view.shape[2], true);
        }
      }
    }
    const auto sentinel = static_cast<double>(kGradientSentinel);
    for (std::size_t i = 0; i < owned.size(); ++i)
      touched += !owned[i] && at(view, static_cast<std::int64_t>(i)) != sentinel;
  }
  return touched;
}

std::vector<double> Gradients::all() const {
  std::vector<double> result;
  for (std::size_t s = 0; s < backward.sequences.size(); ++s) {
    const std::vector<double> part = of_sequence(s);
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

// The yardstick: plain loops in float, with what a plain implementation stores (O, and the results) rounded to its type.
void plain_backward(const Backward& p, bool rounds_weights) {
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
        const auto rounded = [&](float weight) {
          if (!rounds_weights) return weight;
          double stored = 0;
          reference::store(&stored, storage, 0, static_cast<double>(weight));
          return static_cast<float>(load(&stored, storage, 0));
        };
        const float slope = cap != 0.0f ? 1.0f - x[n] / cap * (x[n] / cap) : 1.0f;
        const float ds = rounded(probability * (dp[n] - big_d) * slope) * scale;
        const std::int64_t k_at = key_at(p.k, sequence, keys[n], h / group);
        const std::int64_t dk_at = key_at(p.dk, sequence, keys[n], h / group),
                           dv_at = key_at(p.dv, sequence, keys[n], h / group);
        for (std::int64_t d = 0; d < d_qk; ++d) {
          dq[index(dq_at + d)] += ds * value(p.k, k_at + d);
          dk[index(dk_at + d)] += ds * value(p.q, q_at + d);
        }
        for (std::int64_t d = 0; d < d_v; ++d)
          dv[index(dv_at + d)] += rounded(probability) * value(p.dout, dout_at + d);
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

}  // namespace basin::attention::cpu_tests
