// The micro-kernel of attention: rows against one segment of keys. One source for every target.
#include "attention/cpu/kernel.h"

#include "attention/cpu/few_rows.h"
#include "attention/cpu/many_rows.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

// Not inlined, so that the compiler moves nothing out of the rounding that its caller sets.
template <Storage kStorage>
__attribute__((noinline)) void segment(const Block& block, std::int64_t begin, std::int64_t end,
                                       std::int64_t next, const State& state, void* scratch) {
  if (block.rows > kFewRows) return many_rows<kStorage>(block, begin, end, state, scratch);
  FewRows<kStorage>(block, state, scratch).run(begin, end, next);
}

void run_segment(const Block& block, std::int64_t begin, std::int64_t end, std::int64_t next,
                 const State& state, void* scratch) {
  switch (block.storage) {
    case Storage::f32:
      return segment<Storage::f32>(block, begin, end, next, state, scratch);
    case Storage::f16:
      return segment<Storage::f16>(block, begin, end, next, state, scratch);
    case Storage::bf16:
      const RoundingOfDots<Storage::bf16> rounding;
      return segment<Storage::bf16>(block, begin, end, next, state, scratch);
  }
}

void run_pack_queries(Storage storage, int d, int rows, const std::byte* const* row, void* out) {
  float* to = static_cast<float*>(out);
  switch (storage) {
    case Storage::f32:
      return pack_queries<Storage::f32>(d, rows, row, to);
    case Storage::f16:
      return pack_queries<Storage::f16>(d, rows, row, to);
    case Storage::bf16:
      return pack_queries<Storage::bf16>(d, rows, row, to);
  }
}

void clear(int rows, int d_v, const State& state) {
  for (int r = 0; r < rows; ++r) state.m[r] = -__builtin_inff();
  __builtin_memset(state.l, 0, sizeof(float) * static_cast<std::size_t>(rows) * kLanes);
  __builtin_memset(state.acc, 0,
                   sizeof(float) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(d_v));
}

void fold(int rows, int d_v, const State& segment, const State& total) {
  for (int r = 0; r < rows; ++r) {
    const float m_s = segment.m[r];
    const float l_s = segment.l[static_cast<std::ptrdiff_t>(r) * kLanes];
    if (m_s == -__builtin_inff() && l_s == 0.0f) continue;  // no key: exactly nothing (a NaN goes on)
    const float m = total.m[r];
    const float now = m_s > m ? m_s : m;
    const F16 a = exp2(sub(set(m), set(now)));
    const F16 b = exp2(sub(set(m_s), set(now)));
    float* l = total.l + static_cast<std::ptrdiff_t>(r) * kLanes;
    const F16 sum = fma(set(l[0]), a, mul(set(l_s), b));
    l[0] = hn::GetLane(sum.part[0]);
    total.m[r] = now;
    const float* from = segment.acc + static_cast<std::ptrdiff_t>(r) * d_v;
    float* to = total.acc + static_cast<std::ptrdiff_t>(r) * d_v;
    for (int d = 0; d < d_v; d += kLanes) store(fma(load(to + d), a, mul(load(from + d), b)), to + d);
  }
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET

namespace basin::attention::cpu {

Kernel kernel(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
  constexpr std::size_t kScratch =
      sizeof(FewRowsScratch) > sizeof(ManyRowsScratch) ? sizeof(FewRowsScratch) : sizeof(ManyRowsScratch);
  return {kScratch, run_pack_queries, clear, run_segment, fold};
}

}  // namespace basin::attention::cpu
