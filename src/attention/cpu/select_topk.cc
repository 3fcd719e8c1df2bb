// The largest of many scores, by radix select: three rounds of counting find the exact value of the smallest one that is taken, and
// a last pass collects. No list of candidates is kept, so no distribution of values can overflow one.
#include <fmt/format.h>

#include <array>
#include <bit>

#include "basin/attention/cpu.h"
#include "basin/base/error.h"

namespace basin::attention::cpu {
namespace {

// Digits from the top of a 32-bit word.
constexpr int kDigitBits = 11;
constexpr std::array<int, 3> kShifts = {21, 10, 0};

// Words in the order of the floats; 0 and -0 are one.
std::uint32_t ordered(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

void refuse_nan(std::span<const float> scores) {
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] == scores[i]) continue;
    throw Error(ErrorCode::invalid_argument,
                fmt::format("score {} of {} is NaN; nobody can say where it stands", i, scores.size()));
  }
}

struct Threshold {
  std::uint32_t word;  // of the smallest score that is taken
  std::int64_t equal;  // how many of those that equal it
};

Threshold find_threshold(std::span<const float> scores, std::int64_t topk) {
  std::uint32_t prefix = 0, known = 0;  // the digits found, and where they stand
  for (const int shift : kShifts) {
    const std::uint32_t digit = shift == 0 ? (1u << kShifts[1]) - 1 : (1u << kDigitBits) - 1;
    std::array<std::int32_t, 1 << kDigitBits> count{};
    for (const float score : scores) {
      const std::uint32_t word = ordered(score);
      if ((word & known) == prefix) ++count[(word >> shift) & digit];
    }
    std::uint32_t at = digit;
    for (; count[at] < topk; --at) topk -= count[at];
    prefix |= at << shift;
    known |= digit << shift;
  }
  return {prefix, topk};
}

}  // namespace

std::int64_t select_topk(std::span<const float> scores, std::int64_t topk, std::int32_t* out) {
  refuse_nan(scores);
  const auto count = static_cast<std::int64_t>(scores.size());
  if (topk >= count) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<std::int32_t>(i);
    return count;
  }
  if (topk <= 0) return 0;
  Threshold threshold = find_threshold(scores, topk);
  std::int64_t taken = 0;
  for (std::int64_t i = 0; taken < topk; ++i) {
    const std::uint32_t word = ordered(scores[static_cast<std::size_t>(i)]);
    if (word < threshold.word || (word == threshold.word && threshold.equal-- <= 0)) continue;
    out[taken++] = static_cast<std::int32_t>(i);
  }
  return topk;
}

}  // namespace basin::attention::cpu
