#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <utility>

#include "cli/output.h"

namespace basin::cli {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr double kQuietSeconds = 2.0;  // short jobs print no plain lines
constexpr double kLineSeconds = 10.0;
constexpr double kLineFraction = 0.1;
constexpr std::int64_t kBarCells = 24;

std::string duration(double seconds) {
  const auto s = std::llround(seconds);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
}

}  // namespace

std::string progress_text(const std::string& label, const std::string& unit, std::int64_t done,
                          std::int64_t total, double seconds) {
  const double rate = seconds > 0.0 ? static_cast<double>(done) / seconds : 0.0;
  const double percent = total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0;
  std::string text = fmt::format("{}  {}/{} {}  {:.0f}%  {:.0f}/s", label, done, total, unit, percent, rate);
  if (rate > 0.0 && done < total) {
    text += "  ETA " + duration(static_cast<double>(total - done) / rate);
  }
  return text;
}

Progress::Progress(std::string label, std::string unit)
    : label_(std::move(label)), unit_(std::move(unit)), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  clear_bar();
}

void Progress::clear_bar() {
  if (!bar_shown_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  bar_shown_ = false;
}

void Progress::update(std::int64_t done, std::int64_t total) {
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double since = std::chrono::duration<double>(now - drawn_).count();
  if (terminal_) {
    if (done >= total) return clear_bar();
    if (since < kRedrawSeconds) return;
    const std::int64_t cells = total > 0 ? kBarCells * done / total : kBarCells;
    const std::string bar = std::string(static_cast<std::size_t>(cells), '#') +
                            std::string(static_cast<std::size_t>(kBarCells - cells), '.');
    fmt::print(stderr, "\r[{}] {}\x1b[K", bar, progress_text(label_, unit_, done, total, seconds));
    std::fflush(stderr);
    bar_shown_ = true;
    drawn_ = now;
    return;
  }
  const double fraction = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0;
  if (seconds < kQuietSeconds || done >= total) return;
  if (fraction - line_fraction_ < kLineFraction && since < kLineSeconds) return;
  print_note(progress_text(label_, unit_, done, total, seconds));
  drawn_ = now;
  line_fraction_ = fraction;
}

}  // namespace basin::cli
