#include "models/index_fp8.h"

#include <algorithm>
#include <cmath>

namespace basin::models {
namespace {

constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kFloor = 1e-4f;     // of the row's largest magnitude, as DeepSeek has it

void hadamard(float* x, std::int64_t d) {
  for (std::int64_t half = 1; half < d; half *= 2) {
    for (std::int64_t begin = 0; begin < d; begin += 2 * half) {
      for (std::int64_t i = begin; i < begin + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (std::int64_t i = 0; i < d; ++i) x[i] *= scale;
}

// To nearest even among the values of e4m3: three bits behind the leading one, none finer than 2^-9.
float round_e4m3(float x) {
  const float limited = std::clamp(x, -kLargest, kLargest);
  int exponent = 0;
  std::frexp(limited, &exponent);
  const int step = std::max(exponent - 4, -9);
  return std::ldexp(std::nearbyint(std::ldexp(limited, -step)), step);
}

}  // namespace

void to_index_fp8(float* x, std::int64_t rows, std::int64_t d, ThreadPool& pool) {
  pool.parallel_for(rows, [&](std::int64_t r, int) {
    float* row = x + r * d;
    hadamard(row, d);
    float largest = kFloor;
    for (std::int64_t i = 0; i < d; ++i) largest = std::max(largest, std::abs(row[i]));
    const float scale = std::exp2(std::ceil(std::log2(largest / kLargest)));
    for (std::int64_t i = 0; i < d; ++i) row[i] = round_e4m3(row[i] / scale) * scale;
  });
}

}  // namespace basin::models
