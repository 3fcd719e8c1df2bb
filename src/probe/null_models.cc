// Selections without content: by chance, and by position alone.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

#include "probe/study.h"

namespace basin::probe {

NullCounts random_counts(std::int64_t first, std::int64_t queries, std::int64_t topk) {
  NullCounts counts;
  for (const std::int64_t block : kBlocks) {
    const std::int64_t blocks = queries / block;
    if (blocks == 0) break;
    double intersection = 0.0, united = 0.0;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t begin = first + b * block;
      double in_all = 1.0, in_none = 1.0;
      // From the last query back: a key that only queries from t on see is in none of them with probability `in_none`.
      for (std::int64_t t = begin + block - 1; t >= begin; --t) {
        const double share = std::min(1.0, static_cast<double>(topk) / static_cast<double>(t + 1));
        in_all *= share;
        in_none *= 1.0 - share;
        united += t > begin ? 1.0 - in_none : 0.0;  // key t itself
      }
      const auto common = static_cast<double>(begin + 1);  // keys that every query of the block sees
      intersection += common * in_all;
      united += common * (1.0 - in_none);
    }
    counts.intersection.push_back(intersection / static_cast<double>(blocks));
    counts.united.push_back(united / static_cast<double>(blocks));
  }
  return counts;
}

std::vector<double> deepseek_frequencies() {
  constexpr int kDimensions = 64;
  constexpr double kTheta = 10000.0, kFactor = 40.0, kOriginal = 4096.0, kFast = 32.0, kSlow = 1.0;
  const auto corrected = [&](double rotations) {
    return kDimensions * std::log(kOriginal / (rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(kTheta));
  };
  const double low = std::max(std::floor(corrected(kFast)), 0.0);
  const double high = std::min(std::ceil(corrected(kSlow)), kDimensions - 1.0);
  std::vector<double> frequencies;
  for (int i = 0; i < kDimensions / 2; ++i) {
    const double frequency = std::pow(kTheta, -2.0 * i / kDimensions);
    const double ramp = std::clamp((i - low) / std::max(high - low, 0.001), 0.0, 1.0);
    frequencies.push_back(frequency / kFactor * ramp + frequency * (1.0 - ramp));
  }
  return frequencies;
}

double rope_score(std::int64_t distance, std::span<const double> frequencies) {
  double sum = 0.0;
  for (const double frequency : frequencies) sum += 2.0 * std::cos(static_cast<double>(distance) * frequency);
  return sum;
}

std::vector<std::int64_t> rope_peaks(std::int64_t end, std::size_t most,
                                     std::span<const double> frequencies) {
  std::vector<std::pair<double, std::int64_t>> peaks;
  for (std::int64_t a = 2; a < end; ++a) {
    const double before = rope_score(a - 1, frequencies), here = rope_score(a, frequencies);
    if (here > before && here >= rope_score(a + 1, frequencies)) peaks.emplace_back(-here, a);
  }
  std::sort(peaks.begin(), peaks.end());
  peaks.resize(std::min(most, peaks.size()));
  std::vector<std::int64_t> distances;
  for (const auto& [score, a] : peaks) distances.push_back(a);
  std::sort(distances.begin(), distances.end());
  return distances;
}

std::vector<std::int32_t> rope_selections(std::int64_t first, std::int64_t queries, std::int64_t topk,
                                          std::span<const double> frequencies) {
  std::vector<double> score(static_cast<std::size_t>(first + queries));
  for (std::size_t a = 0; a < score.size(); ++a)
    score[a] = rope_score(static_cast<std::int64_t>(a), frequencies);
  std::vector<std::int32_t> order(score.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    const double x = score[static_cast<std::size_t>(a)], y = score[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
  std::vector<std::int32_t> rows(static_cast<std::size_t>(queries * topk), -1);
  for (std::int64_t q = 0; q < queries; ++q) {
    std::int32_t* row = rows.data() + q * topk;
    std::int64_t count = 0;
    for (std::size_t i = 0; i < order.size() && count < topk; ++i) {
      if (order[i] <= first + q) row[count++] = static_cast<std::int32_t>(first + q) - order[i];
    }
  }
  return rows;
}

}  // namespace basin::probe
