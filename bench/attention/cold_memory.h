// What the benchmarks of attention share: memory that no cache holds, and the time of reading it.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include "basin/base/dtype.h"
#include "basin/base/thread_pool.h"

namespace basin::attention {

inline constexpr std::int64_t kColdBytes = std::int64_t{512} << 20;  // many times the last-level cache

inline ThreadPool& pool() {
  static ThreadPool threads(0);
  return threads;
}

// A large block of bf16 or f32 ones in memory, touched once. Values do not matter for time, but their place does: a cache
// of keys and values begins at a page.
inline std::span<float> cold_memory() {
  static const std::span<float> memory = [] {
    constexpr auto kPage = std::align_val_t{4096};
    const std::span m(static_cast<float*>(::operator new(kColdBytes, kPage)), kColdBytes / sizeof(float));
    const bf16 one = to_bf16(0.01f);
    const std::uint32_t two = std::uint32_t{one.bits} << 16 | one.bits;
    pool().parallel_for(64, [&](std::int64_t i, int) {
      const std::size_t part = m.size() / 64;
      std::fill_n(m.begin() + static_cast<std::ptrdiff_t>(part) * i, part, std::bit_cast<float>(two));
    });
    return m;
  }();
  return memory;
}

inline double sum_of(const float* p, std::size_t n) {
  typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
  constexpr std::size_t kPerVector = sizeof(Vector) / sizeof(float);
  constexpr std::size_t kPrefetch = 4096 / sizeof(float);  // without it, two threads get a fifth less
  Vector sum[8] = {};
  for (std::size_t i = 0; i + 8 * kPerVector <= n; i += 8 * kPerVector) {
    for (std::size_t k = 0; k < 8; ++k) {
      __builtin_prefetch(p + i + k * kPerVector + kPrefetch);
      sum[k] += *reinterpret_cast<const Vector*>(p + i + k * kPerVector);
    }
  }
  double total = 0;
  for (const Vector& s : sum) total += static_cast<double>(s[0] + s[7] + s[15]);
  return total;
}

template <typename Body>
double seconds_of(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Seconds that all threads take to read `bytes` bytes, spread as the attention spreads them.
inline double read_seconds(const std::byte* memory, std::int64_t bytes) {
  constexpr std::int64_t kParts = 8;
  const std::int64_t part = bytes / kParts;
  return seconds_of([&] {
    pool().parallel_for(kParts, [&](std::int64_t i, int) {
      benchmark::DoNotOptimize(sum_of(reinterpret_cast<const float*>(memory + part * i),
                                      static_cast<std::size_t>(part) / sizeof(float)));
    });
  });
}

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace basin::attention
