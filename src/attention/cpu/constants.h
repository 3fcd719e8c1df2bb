// The constants of the CPU's reduction order. Changing one changes results: it is a breaking change.
//
// For one row (a query and a head), over its visible keys j, counted from the first key of the sequence:
//   score    s = one FMA chain over ascending d from zero. bf16 on avx512_bf16: one chain of VDPBF16PS pair dots,
//            pairs anchored at even d. x = s * (scale log2 e), or softcap log2 e * tanh(s * (scale / softcap)).
//   tile     kTileKeys keys from a multiple of kTileKeys: m' = max(m, x); l and acc times exp2(m - m');
//            P = exp2(x - m'); l[j mod kLanes] += P; acc = one FMA chain over ascending j of (P rounded to V's dtype) V_j.
//            bf16 on avx512_bf16: the same chain through VDPBF16PS, which multiplies and adds the upper halves first,
//            each with a rounding; within a segment numbers below 2^-126 are zero, as that instruction has them.
//   segment  kSegmentKeys keys from a multiple of kSegmentKeys: starts at m = -inf, l = 0, acc = 0, tiles ascending;
//            then the kLanes sums are folded 8-4-2-1.
//   fold     segments ascending from m = -inf, l = 0, acc = 0: m' = max(m, m_s), a = exp2(m - m'), b = exp2(m_s - m'),
//            l = fma(l, a, l_s b), acc = fma(acc, a, acc_s b).
//   finish   joint maximum with the sink, in double (softmax_state.h). Zeros in the output are +0.
// Keys that a row does not see take part in none of it, so skipping them or their tile changes nothing.
// On the generic target an FMA is a multiplication and an addition.
#pragma once

#include <cstdint>

#include "base/kernel_words.h"

namespace basin::attention::cpu {

// kLanes, the keys in one logical vector, is 16 on every target (base/kernel_words.h).
inline constexpr int kTileKeys = 64;  // one update of the running maximum; visibility is one 64-bit word
inline constexpr std::int64_t kSegmentKeys = 1024;  // a multiple of kTileKeys

// Limits of the implementation; they do not touch results.
inline constexpr int kMaxHead = 256;       // largest d_qk or d_v
inline constexpr int kMaxBlockRows = 192;  // rows (query, head) that share one pass over the keys
inline constexpr int kFewRows = 16;        // rows of a kv head up to which reading takes most of the time

}  // namespace basin::attention::cpu
