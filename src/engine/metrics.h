// What the serving engine counts. A copy is handed out; names and units of export are the server's business.
#pragma once

#include <array>
#include <cstdint>

namespace basin::engine {

/// Seconds, in buckets that grow by about 2.
class Histogram {
 public:
  static constexpr std::array<double, 18> kBounds = {
      0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300, 1800};
  void add(double seconds) {
    std::size_t bucket = 0;
    while (bucket < kBounds.size() && seconds > kBounds[bucket]) ++bucket;
    ++counts_[bucket];
    sum_ += seconds;
  }
  /// Values up to kBounds[i]; the last entry holds those beyond all bounds.
  const std::array<std::int64_t, kBounds.size() + 1>& counts() const { return counts_; }
  double sum() const { return sum_; }

 private:
  std::array<std::int64_t, kBounds.size() + 1> counts_{};
  double sum_ = 0.0;
};

struct Metrics {
  // Since the start.
  std::int64_t stopped = 0, reached_length = 0, cancelled = 0, timed_out = 0,
               failed = 0;  // choices, by how they ended
  std::int64_t prompt_tokens = 0, generated_tokens = 0;
  std::int64_t computed_tokens = 0;  // prompts without what was found, and replays
  std::int64_t prefix_queried_tokens = 0, prefix_hit_tokens = 0;
  std::int64_t preemptions = 0;
  std::int64_t copied_pages = 0;  // of windowed sequences that were preempted
  std::int64_t pages_left_window = 0;
  std::int64_t steps = 0;
  Histogram first_token, inter_token, end_to_end, queue_time, step_time;
  // Now.
  std::int64_t running = 0, waiting = 0;
  std::int64_t pages = 0, pages_held = 0, pages_shared = 0, pages_idle = 0;
};

}  // namespace basin::engine
