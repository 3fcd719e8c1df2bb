// Progress of a long job on stderr: a bar with rate and ETA on a terminal, now and then a plain line elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace basin::cli {

class Progress {
 public:
  explicit Progress(std::string label, std::string unit = "tokens");
  ~Progress();  // removes an unfinished bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` units. Cheap: draws ten times a second at most.
  void update(std::int64_t done, std::int64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  void clear_bar();

  std::string label_, unit_;
  bool terminal_;
  bool bar_shown_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = start_;
  double line_fraction_ = 0.0;  // at the last plain line
};

/// The part of the bar that does not depend on the terminal: "label  12000/40000 tokens  30%  5400/s  ETA 5 s".
std::string progress_text(const std::string& label, const std::string& unit, std::int64_t done,
                          std::int64_t total, double seconds);

}  // namespace basin::cli
