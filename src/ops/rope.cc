#include "ops/rope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "basin/base/error.h"

namespace basin::ops {
namespace {

constexpr double kPi = std::numbers::pi;

void check(const RopeConfig& c) {
  const auto refuse = [](const std::string& what) { throw Error(ErrorCode::invalid_argument, what); };
  if (c.rotary_dim < 2 || c.rotary_dim % 2 != 0)
    refuse(fmt::format("rotary_dim is {}; it must be even and positive", c.rotary_dim));
  // With a theta of 1 all pairs turn alike, and yarn divides by its logarithm.
  if (!(c.theta > 1) || !std::isfinite(c.theta))
    refuse(fmt::format("rope theta is {}; it must be above 1", c.theta));
  if (!c.divisors.empty() && c.divisors.size() != static_cast<std::size_t>(c.rotary_dim / 2))
    refuse(fmt::format("{} rope divisors for {} pairs", c.divisors.size(), c.rotary_dim / 2));
  if (!c.divisors.empty() && c.type != RopeType::standard && c.type != RopeType::linear)
    refuse("rope divisors beside a rope type that scales frequencies unevenly itself");
  if (c.type == RopeType::standard) return;
  if (!(c.factor >= 1) || !std::isfinite(c.factor))
    refuse(fmt::format("rope factor is {}; it must be 1 or more", c.factor));
  if (c.type == RopeType::linear) return;
  if (c.original_context < 1)
    refuse(fmt::format("rope original context is {}; it must be positive", c.original_context));
  if (c.type == RopeType::llama3 && !(c.high_freq_factor > c.low_freq_factor && c.low_freq_factor > 0)) {
    refuse(fmt::format("rope high_freq_factor {} must exceed low_freq_factor {} > 0", c.high_freq_factor,
                       c.low_freq_factor));
  }
  if (c.type == RopeType::yarn && !(c.beta_fast >= c.beta_slow && c.beta_slow > 0)) {
    refuse(fmt::format("rope beta_fast {} must be at least beta_slow {} > 0", c.beta_fast, c.beta_slow));
  }
}

// Llama 3.1: long wavelengths are divided by `factor`, short ones stay, those between are interpolated.
double llama3_frequency(const RopeConfig& c, double f) {
  const double wavelength = 2 * kPi / f;
  const auto context = static_cast<double>(c.original_context);
  if (wavelength < context / c.high_freq_factor) return f;
  if (wavelength > context / c.low_freq_factor) return f / c.factor;
  const double smooth = (context / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor);
  return (1 - smooth) * f / c.factor + smooth * f;
}

// YaRN (arXiv 2309.00071): the index at which a pair makes `rotations` turns over the original context.
double yarn_index(const RopeConfig& c, double rotations) {
  return static_cast<double>(c.rotary_dim) *
         std::log(static_cast<double>(c.original_context) / (rotations * 2 * kPi)) / (2 * std::log(c.theta));
}

std::vector<double> yarn_frequencies(const RopeConfig& c, const std::vector<double>& plain) {
  double low = yarn_index(c, c.beta_fast);
  double high = yarn_index(c, c.beta_slow);
  if (c.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(c.rotary_dim - 1));
  if (!(low <= high)) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("rope type yarn finds no pair to interpolate between, with theta {}, original context "
                    "{}, beta_fast {} and beta_slow {}",
                    c.theta, c.original_context, c.beta_fast, c.beta_slow));
  }
  if (low == high) high += 0.001;  // as published: avoids a division by zero
  std::vector<double> result;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    result.push_back(plain[i] / c.factor * ramp + plain[i] * (1 - ramp));
  }
  return result;
}

double yarn_magnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_factor(const RopeConfig& c) {
  if (c.attention_factor != 0) return c.attention_factor;
  if (c.mscale != 0 && c.mscale_all_dim != 0) {
    return yarn_magnitude(c.factor, c.mscale) / yarn_magnitude(c.factor, c.mscale_all_dim);
  }
  return yarn_magnitude(c.factor, 1.0);
}

// p f mod 2 pi, within a turn or so of zero, to about 2^-50. The product is exact in two doubles, and whole turns are
// taken off with 2 pi in two parts (Cody and Waite): k kTurn is a multiple of 2^-50 as the product's high part is, so
// the first difference cancels without error.
double reduced_angle(std::int64_t p, double f) {
  constexpr double kTurn = 2 * kPi;
  constexpr double kTurnRest = 2.4492935982947064e-16;  // 2 pi - kTurn
  const auto position = static_cast<double>(p);
  const double high = position * f;
  const double low = std::fma(position, f, -high);
  const double turns = std::round(high / kTurn);
  return std::fma(-turns, kTurnRest, std::fma(-turns, kTurn, high)) + low;
}

// What rotate() does to one head. A pair is (first, first + step): (i, i + half) or (2 i, 2 i + 1).
struct Head {
  const float* cosine;  // [half]
  const float* sine;    // [half]
  std::int64_t half, stride, step;
  std::int64_t size;  // d
};

template <typename T>
T rounded_to(float x) {
  if constexpr (std::is_same_v<T, f16>) {
    return to_f16(x);
  } else if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(x);
  } else {
    return x;
  }
}

template <typename T>
void rotate_head(const Head& head, const float* from /*[d]*/, T* to /*[d]*/) {
  for (std::int64_t i = 0; i < head.half; ++i) {
    const std::int64_t first = i * head.stride, second = first + head.step;
    const float a = from[first], b = from[second];
    to[first] = rounded_to<T>(a * head.cosine[i] - b * head.sine[i]);
    to[second] = rounded_to<T>(b * head.cosine[i] + a * head.sine[i]);
  }
  for (std::int64_t i = 2 * head.half; i < head.size; ++i) to[i] = rounded_to<T>(from[i]);
}

}  // namespace

Rope::Rope(const RopeConfig& config, RopeLayout layout) : rotary_dim_(config.rotary_dim), layout_(layout) {
  check(config);
  for (std::int64_t i = 0; i < config.rotary_dim / 2; ++i) {
    frequencies_.push_back(
        std::pow(config.theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.rotary_dim)));
  }
  switch (config.type) {
    case RopeType::standard:
      break;
    case RopeType::linear:
      for (double& f : frequencies_) f /= config.factor;
      break;
    case RopeType::llama3:
      for (double& f : frequencies_) f = llama3_frequency(config, f);
      break;
    case RopeType::yarn:
      frequencies_ = yarn_frequencies(config, frequencies_);
      attention_factor_ = yarn_attention_factor(config);
      if (!(attention_factor_ > 0) || !std::isfinite(static_cast<float>(attention_factor_))) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("the rope attention factor is {}; it must be finite and positive",
                                attention_factor_));
      }
      break;
  }
  for (std::size_t i = 0; i < config.divisors.size(); ++i)
    frequencies_[i] /= static_cast<double>(config.divisors[i]);
  // Whatever the formulas above were given: no pair turns backwards, stands still or overtakes plain RoPE's first.
  for (std::size_t i = 0; i < frequencies_.size(); ++i) {
    if (!(frequencies_[i] > 0 && frequencies_[i] <= 1)) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format(
              "rope theta {} and factor {} turn pair {} by {} per token; it must be above 0, at most 1",
              config.theta, config.factor, i, frequencies_[i]));
    }
  }
}

RopeTable Rope::table(std::span<const std::int64_t> positions) const {
  RopeTable table;
  table.tokens = static_cast<std::int64_t>(positions.size());
  table.cosine.reserve(positions.size() * frequencies_.size());
  table.sine.reserve(positions.size() * frequencies_.size());
  for (const std::int64_t p : positions) {
    for (const double f : frequencies_) {
      const double reduced = reduced_angle(p, f);
      table.cosine.push_back(static_cast<float>(std::cos(reduced) * attention_factor_));
      table.sine.push_back(static_cast<float>(std::sin(reduced) * attention_factor_));
    }
  }
  return table;
}

void Rope::rotate(ConstView x, const RopeTable& table, View out, ThreadPool& pool) const {
  const std::int64_t tokens = x.shape[0], heads = x.shape[1], d = x.shape[2];
  const std::int64_t half = rotary_dim_ / 2;
  const bool known = out.dtype == DType::f32 || out.dtype == DType::f16 || out.dtype == DType::bf16;
  if (x.dtype != DType::f32 || !known || table.tokens != tokens || d < rotary_dim_) {
    throw Error(ErrorCode::internal,
                fmt::format("rotate: {} input, {} output, {} tokens, table of {}, head size {}, rotary {}",
                            name(x.dtype), name(out.dtype), tokens, table.tokens, d, rotary_dim_));
  }
  const bool halves = layout_ == RopeLayout::half;
  constexpr std::int64_t kTokensPerTask = 16;
  pool.parallel_for((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](std::int64_t task, int) {
    for (std::int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) {
      const Head head{table.cosine.data() + t * half,
                      table.sine.data() + t * half,
                      half,
                      halves ? 1 : 2,
                      halves ? half : 1,
                      d};
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* from = static_cast<const float*>(x.data) + t * x.stride[0] + h * x.stride[1];
        const std::int64_t to = t * out.stride[0] + h * out.stride[1];
        switch (out.dtype) {
          case DType::f16:
            rotate_head(head, from, static_cast<f16*>(out.data) + to);
            break;
          case DType::bf16:
            rotate_head(head, from, static_cast<bf16*>(out.data) + to);
            break;
          default:
            rotate_head(head, from, static_cast<float*>(out.data) + to);
        }
      }
    }
  });
}

}  // namespace basin::ops
