#include "attention/cpu/problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "basin/attention/mask.h"
#include "basin/attention/reference.h"

namespace basin::attention::cpu_tests {
namespace {

constexpr float kSentinel = -12288.0f;  // exact in every storage type

// Uniform in [-1, 1), a hash of the place.
float noise(std::uint64_t kind, std::int64_t sequence, std::int64_t position, std::int64_t head,
            std::int64_t d) {
  std::uint64_t x = kind * 0x9e3779b97f4a7c15u;
  for (const std::int64_t part : {sequence, position, head, d}) {
    x ^= static_cast<std::uint64_t>(part) + 0x632be59bd9b4e019u;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 32;
    x *= 0xc4ceb9fe1a85ec53u;
    x ^= x >> 29;
  }
  return static_cast<float>(static_cast<double>(x >> 11) * 0x1p-52 - 1.0);
}

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

float read_element(DType dtype, const std::byte* data, std::int64_t i) {
  switch (dtype) {
    case DType::f16: {
      f16 x;
      std::memcpy(&x, data + 2 * i, 2);
      return to_float(x);
    }
    case DType::bf16: {
      bf16 x;
      std::memcpy(&x, data + 2 * i, 2);
      return to_float(x);
    }
    default: {
      float x;
      std::memcpy(&x, data + 4 * i, 4);
      return x;
    }
  }
}

void write_element(DType dtype, std::byte* data, std::int64_t i, float value) {
  switch (dtype) {
    case DType::f16: {
      const f16 x = to_f16(value);
      std::memcpy(data + 2 * i, &x, 2);
      break;
    }
    case DType::bf16: {
      const bf16 x = to_bf16(value);
      std::memcpy(data + 2 * i, &x, 2);
      break;
    }
    default:
      std::memcpy(data + 4 * i, &value, 4);
  }
}

Problem::Problem(const Shape& shape, const std::vector<Part>& parts, const Layout& layout) : shape_(shape) {
  const DType dtype = shape.dtype;
  const std::int64_t gap = layout.loose ? 3 : 0;  // rows
  const std::int64_t elements = layout.loose ? layout.gap : 0;

  const std::int64_t q_gap = layout.loose ? layout.q_gap_rows : 0;

  std::int64_t total_q = q_gap + layout.lead_rows, total_kv = 0, total_pages = 1;  // page 0 is never used
  for (const Part& part : parts) {
    Sequence sequence;
    sequence.q_begin = total_q;
    sequence.q_tokens = part.q_tokens;
    sequence.kv_begin = total_kv;
    sequence.kv_tokens = part.kv_tokens;
    sequences_.push_back(sequence);
    for (std::int64_t i = 0; i < part.q_tokens; ++i) token_.push_back(total_q + i);
    total_q += part.q_tokens + q_gap;
    total_kv += part.kv_tokens + gap;
    if (layout.page_tokens > 0) total_pages += (part.kv_tokens + layout.page_tokens - 1) / layout.page_tokens;
  }

  const auto dense = [&](std::vector<std::byte>& memory, DType type, std::int64_t rows, std::int64_t heads,
                         std::int64_t d, float fill) {
    View view = contiguous<void*>(nullptr, type, {rows, heads, d});
    view.stride = {heads * (d + elements) + elements, d + elements, 1, 0};
    memory.resize(index((rows * view.stride[0] + 16) * block_bytes(type)));
    view.data = memory.data();
    const auto count = static_cast<std::int64_t>(memory.size()) / block_bytes(type);
    for (std::int64_t i = 0; i < count; ++i) write_element(type, memory.data(), i, fill);
    return view;
  };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  forward_.q = dense(q_, dtype, total_q, shape.h_q, shape.d_qk, kNaN);
  if (shape.q_sink) forward_.q_sink = dense(q_sink_, dtype, total_q, shape.h_q, shape.d_qk, kNaN);
  forward_.out = dense(out_, shape.out_dtype, total_q, shape.h_q, shape.d_v, kSentinel);
  const std::int64_t kv_rows = layout.page_tokens > 0 ? total_pages * layout.page_tokens : total_kv;
  const auto paged = [&](View view) {
    if (layout.page_tokens == 0) return view;
    view.rank = 4;
    view.shape = {total_pages, layout.page_tokens, view.shape[1], view.shape[2]};
    view.stride = {layout.page_tokens * view.stride[0], view.stride[0], view.stride[1], 1};
    return view;
  };
  forward_.k = paged(dense(k_, dtype, kv_rows, shape.h_kv, shape.d_qk, kNaN));
  forward_.v = paged(dense(v_, dtype, kv_rows, shape.h_kv, shape.d_v, kNaN));

  lse_.assign(index(total_q * shape.h_q), kSentinel);
  lse_with_sink_ = lse_;
  forward_.lse = lse_.data();
  forward_.lse_with_sink = lse_with_sink_.data();
  forward_.spec = shape.spec;
  if (forward_.spec.scale == 0) forward_.spec.scale = 1 / std::sqrt(static_cast<double>(shape.d_qk));
  if (!shape_.sink_logit.empty()) forward_.sink_logit = shape_.sink_logit.data();

  std::int64_t row = 0;
  std::int32_t next_page =
      static_cast<std::int32_t>(total_pages) - 1;  // descending, so pages are out of order
  pages_.resize(parts.size());
  for (std::size_t s = 0; s < parts.size(); ++s) {
    const Part& part = parts[s];
    std::vector<bool> seen(index(part.kv_tokens), false);
    for (std::int64_t i = 0; i < part.q_tokens; ++i, ++row) {
      const std::int64_t p = part.kv_tokens - part.q_tokens + i;
      for (std::int64_t j = 0; j < part.kv_tokens; ++j) {
        if (visible(shape.spec.mask, p, j)) seen[index(j)] = true;
      }
      for (std::int64_t h = 0; h < shape.h_q; ++h) {
        for (std::int64_t d = 0; d < shape.d_qk; ++d) {
          const std::int64_t at = token_[index(row)] * forward_.q.stride[0] + h * forward_.q.stride[1] + d;
          write_element(dtype, q_.data(), at, shape.spread * noise(1, part.sequence, p, h, d));
          if (shape.q_sink) {
            write_element(dtype, q_sink_.data(), at, shape.spread * noise(2, part.sequence, p, h, d));
          }
        }
      }
    }
    if (layout.page_tokens > 0) {
      for (std::int64_t first = 0; first < part.kv_tokens; first += layout.page_tokens) {
        bool used = false;
        for (std::int64_t j = first; j < std::min(first + layout.page_tokens, part.kv_tokens); ++j) {
          used = used || seen[index(j)];
        }
        pages_[s].push_back(used ? next_page-- : -1);
      }
      sequences_[s].pages = pages_[s].data();
    }
  }
  forward_.sequences = sequences_;
  for (std::size_t s = 0; s < parts.size(); ++s) {
    const Part& part = parts[s];
    std::vector<bool> seen(index(part.kv_tokens), false);
    for (std::int64_t i = 0; i < part.q_tokens; ++i) {
      for (std::int64_t j = 0; j < part.kv_tokens; ++j) {
        if (visible(shape.spec.mask, part.kv_tokens - part.q_tokens + i, j)) seen[index(j)] = true;
      }
    }
    for (std::int64_t j = 0; j < part.kv_tokens; ++j) {
      if (!seen[index(j)]) continue;
      for (std::int64_t h = 0; h < shape.h_kv; ++h) {
        for (std::int64_t d = 0; d < shape.d_qk; ++d) set_key(s, j, h, d, noise(3, part.sequence, j, h, d));
        for (std::int64_t d = 0; d < shape.d_v; ++d)
          set_value(s, j, h, d, shape.value_scale * noise(4, part.sequence, j, h, d));
      }
    }
  }
}

std::int64_t Problem::key_offset(const ConstView& view, std::size_t part, std::int64_t j,
                                 std::int64_t head) const {
  if (view.rank == 3) return (sequences_[part].kv_begin + j) * view.stride[0] + head * view.stride[1];
  const std::int64_t page = pages_[part][index(j / view.shape[1])];
  return page * view.stride[0] + j % view.shape[1] * view.stride[1] + head * view.stride[2];
}

void Problem::set_key(std::size_t part, std::int64_t j, std::int64_t head, std::int64_t d, float value) {
  write_element(shape_.dtype, k_.data(), key_offset(forward_.k, part, j, head) + d, value);
}

void Problem::set_value(std::size_t part, std::int64_t j, std::int64_t head, std::int64_t d, float value) {
  write_element(shape_.dtype, v_.data(), key_offset(forward_.v, part, j, head) + d, value);
}

void Problem::set_query(std::int64_t row, std::int64_t head, std::int64_t d, float value) {
  const std::int64_t at = token_[index(row)] * forward_.q.stride[0] + head * forward_.q.stride[1] + d;
  write_element(shape_.dtype, q_.data(), at, value);
  if (shape_.q_sink) write_element(shape_.dtype, q_sink_.data(), at, value);
}

float Problem::out(std::int64_t row, std::int64_t head, std::int64_t d) const {
  const View& view = forward_.out;
  return read_element(view.dtype, out_.data(),
                      token_[index(row)] * view.stride[0] + head * view.stride[1] + d);
}

float Problem::lse(std::int64_t row, std::int64_t head) const {
  return lse_[index(head * forward_.q.shape[0] + token_[index(row)])];
}

float Problem::lse_with_sink(std::int64_t row, std::int64_t head) const {
  return lse_with_sink_[index(head * forward_.q.shape[0] + token_[index(row)])];
}

std::vector<std::vector<std::uint32_t>> Problem::bits() const {
  std::vector<std::vector<std::uint32_t>> result;
  for (std::int64_t row = 0; row < rows(); ++row) {
    std::vector<std::uint32_t> words;
    for (std::int64_t h = 0; h < shape_.h_q; ++h) {
      for (std::int64_t d = 0; d < shape_.d_v; ++d)
        words.push_back(std::bit_cast<std::uint32_t>(out(row, h, d)));
      words.push_back(std::bit_cast<std::uint32_t>(lse(row, h)));
      words.push_back(std::bit_cast<std::uint32_t>(lse_with_sink(row, h)));
    }
    result.push_back(std::move(words));
  }
  return result;
}

bool Problem::sentinels_intact() const {
  const View& view = forward_.out;
  const std::int64_t total_q = view.shape[0];
  std::vector<bool> written(out_.size() / index(block_bytes(view.dtype)), false);
  std::vector<bool> lse_written(lse_.size(), false);
  for (const std::int64_t token : token_) {
    for (std::int64_t h = 0; h < shape_.h_q; ++h) {
      lse_written[index(h * total_q + token)] = true;
      for (std::int64_t d = 0; d < shape_.d_v; ++d) {
        written[index(token * view.stride[0] + h * view.stride[1] + d)] = true;
      }
    }
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    const float value = read_element(view.dtype, out_.data(), static_cast<std::int64_t>(i));
    if (!written[i] && value != kSentinel) return false;
  }
  for (std::size_t i = 0; i < lse_.size(); ++i) {
    if (!lse_written[i] && (lse_[i] != kSentinel || lse_with_sink_[i] != kSentinel)) return false;
  }
  return true;
}

std::vector<std::vector<std::uint32_t>> in_chunks(const Shape& shape, std::int64_t sequence,
                                                  std::int64_t tokens, std::int64_t chunk,
                                                  const Layout& layout,
                                                  const std::function<void(const Forward&)>& run) {
  std::vector<std::vector<std::uint32_t>> result;
  for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, tokens);
    Problem problem(shape, {{sequence, end - begin, end}}, layout);
    run(problem.forward());
    for (auto& row : problem.bits()) result.push_back(std::move(row));
  }
  return result;
}

bool same(float a, float b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

Difference difference(const Problem& a, const Problem& b) {
  Difference result;
  const auto add = [&](float x, float y) {
    ++result.count;
    if (same(x, y)) return;
    const double d = std::abs(static_cast<double>(x) - static_cast<double>(y));
    const double error = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    result.largest = std::max(result.largest, error);
    result.rms += error * error;
  };
  for (std::int64_t row = 0; row < a.rows(); ++row) {
    for (std::int64_t h = 0; h < a.forward().out.shape[1]; ++h) {
      for (std::int64_t d = 0; d < a.forward().out.shape[2]; ++d) add(a.out(row, h, d), b.out(row, h, d));
      add(a.lse(row, h), b.lse(row, h));
      add(a.lse_with_sink(row, h), b.lse_with_sink(row, h));
    }
  }
  if (result.count > 0) result.rms = std::sqrt(result.rms / static_cast<double>(result.count));
  return result;
}

/// The distance between two neighbours of the output's type at its largest value.
double largest_rounding(const Problem& problem) {
  const View& out = problem.forward().out;
  if (out.dtype == DType::f32) return 0;
  double largest = 0;
  for (std::int64_t row = 0; row < problem.rows(); ++row) {
    for (std::int64_t h = 0; h < out.shape[1]; ++h) {
      for (std::int64_t d = 0; d < out.shape[2]; ++d)
        largest = std::max(largest, std::abs(double{problem.out(row, h, d)}));
    }
  }
  return largest * (out.dtype == DType::f16 ? 0x1p-10 : 0x1p-7);
}

Errors errors(const Shape& shape, const std::vector<Part>& parts, const Layout& layout,
              const std::function<void(const Forward&)>& fast) {
  Problem run(shape, parts, layout), oracle(shape, parts, layout), yardstick(shape, parts, layout);
  fast(run.forward());
  reference::forward(oracle.forward(), reference::Precision::f64);
  reference::forward(yardstick.forward(), reference::Precision::storage);
  return {difference(run, oracle), difference(yardstick, oracle), largest_rounding(oracle),
          run.sentinels_intact()};
}

}  // namespace basin::attention::cpu_tests
