// The numbers that turn raw scores into exponents of two.
#pragma once

#include "basin/attention/spec.h"

namespace basin::attention::cuda {

/// x = score * s, or score * tanh(s * cap / (2 log2 e)) with a softcap, in units of log2.
struct Factors {
  float score = 0;
  float cap = 0;  // 0 without a softcap
};

inline Factors factors_of(const Spec& spec) {
  constexpr double kLog2E = 1.4426950408889634;
  if (spec.softcap == 0) return {static_cast<float>(spec.scale * kLog2E), 0.0f};
  return {static_cast<float>(spec.softcap * kLog2E),
          static_cast<float>(2 * kLog2E * spec.scale / spec.softcap)};
}

}  // namespace basin::attention::cuda
