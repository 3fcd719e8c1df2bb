// Whole runs of a stream, for tests: every row of logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "engine/stream.h"

namespace basin::test {

inline std::vector<float> all_logits(models::Model& model, const engine::StreamOptions& options,
                                     std::span<const std::int32_t> tokens, int threads = 2) {
  ThreadPool pool(threads);
  engine::Stream stream(model, options, pool);
  std::vector<float> logits;
  stream.feed(tokens, models::LogitsRows::all, [&](std::int64_t, std::int64_t, std::span<const float> rows) {
    logits.insert(logits.end(), rows.begin(), rows.end());
    return true;
  });
  return logits;
}

/// True when the bits agree, so that NaN equals NaN and 0 differs from -0.
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Infinite when a size differs or a value is NaN.
inline float largest_difference(std::span<const float> a, std::span<const float> b) {
  float largest = a.size() == b.size() ? 0.0f : std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float difference = std::abs(a[i] - b[i]);
    largest = difference <= largest      ? largest
              : difference == difference ? difference
                                         : std::numeric_limits<float>::infinity();
  }
  return largest;
}

}  // namespace basin::test
