// The second pass of the probe. Scores are those of attention/cpu bit for bit; what follows only adds up.
#include "probe/cpu/kernel.h"

#include "attention/cpu/many_rows.h"
#include "probe/cpu/budget.h"

namespace basin::probe::cpu::BASIN_TARGET {
namespace {

using namespace basin::attention::cpu::BASIN_TARGET;
using attention::cpu::Block;
using attention::cpu::kMaxHead;
using attention::cpu::kTileKeys;

constexpr int kDiagonals = kTileKeys + kMaxQueries;

struct Scratch {
  alignas(64) float keys[kTileKeys * kMaxHead];
  alignas(64) float column[kMaxGroup][kTileKeys];     // sum over queries
  alignas(64) float diagonal[kMaxGroup][kDiagonals];  // the same, shifted by the query
  alignas(64) float mean[kMaxQueries][kTileKeys];     // sum over heads
  std::uint64_t mask[kMaxQueries * kMaxGroup];
};

BASIN_INLINE float sum_of_lanes(const F16& a) {
  V sum = a.part[0];
  unroll<kParts - 1>([&](auto i) BASIN_LAMBDA { sum = hn::Add(sum, a.part[i + 1]); });
#if HWY_TARGET == HWY_SCALAR
  return sum.raw;
#else
  return hn::GetLane(hn::SumOfLanes(D(), sum));
#endif
}

BASIN_INLINE void add_to(const F16& a, float* p) {
  store(add(load(p), a), p);
}

// Appends the lanes that are at least `least`, and returns how many they are.
BASIN_INLINE std::int64_t append(const F16& a, float least, float* to) {
  std::size_t count = 0;
  unroll<kParts>([&](auto i) BASIN_LAMBDA {
    count += hn::CompressStore(a.part[i], hn::Ge(a.part[i], hn::Set(D(), least)), D(), to + count);
  });
  return static_cast<std::int64_t>(count);
}

// Sums of A and of A log2 A of one row over one tile.
struct RowSums {
  float mass, information;
};

// Turns raw scores of a row into weights, in place, and adds them to the tile's sums.
BASIN_INLINE RowSums weigh(const Gather& gather, int row, std::uint64_t mask, int first, int last, float* x,
                           Scratch& scratch) {
  const Block& block = *gather.block;
  const int query = row / gather.group, head = row % gather.group;
  const F16 scale = set(block.score_scale), cap = set(block.softcap);
  const F16 denominator = set(gather.denominator[row]);
  const F16 floor = set(-1000.0f);  // where A is zero, so that A log2 A is not 0 times infinity
  float* diagonal = scratch.diagonal[head] + (gather.queries - 1 - query);
  F16 mass = set(0.0f), information = set(0.0f);
  for (int g = first; g < last; ++g) {
    const int at = g * kLanes;
    F16 s = mul(load(x + at), scale);
    if (block.softcap != 0.0f) s = mul(tanh(s), cap);
    s = sub(s, denominator);
    const std::uint32_t visible = group_bits(mask, g);
    if (visible != 0xffffu) s = keep(s, visible);
    const F16 a = exp2(s);
    store(a, x + at);
    mass = add(mass, a);
    information = fma(a, max(s, floor), information);
    add_to(a, scratch.column[head] + at);
    add_to(a, diagonal + at);
    add_to(a, scratch.mean[query] + at);
    gather.list_count[row] += append(a, gather.keep[row], gather.list[row] + gather.list_count[row]);
  }
  return {sum_of_lanes(mass), sum_of_lanes(information)};
}

// Adds the tile to the sums below the cuts of a row: a cut beyond the tile takes its whole mass, one inside a part.
BASIN_INLINE void add_below_cuts(const Gather& gather, int row, std::int64_t tile_begin, int first, int last,
                                 float mass, const float* weights) {
  const std::int64_t* cuts = gather.cuts + static_cast<std::ptrdiff_t>(row / gather.group) * gather.cut_count;
  double* below = gather.below_cut + static_cast<std::ptrdiff_t>(row) * gather.cut_count;
  for (int c = gather.cut_count - 1; c >= 0; --c) {
    const std::int64_t end = cuts[c] - tile_begin;  // keys of the tile before the cut
    if (end <= 0) return;
    double sum = 0.0;
    for (int i = first * kLanes; end < kTileKeys && i < last * kLanes && i < end; ++i) {
      sum += static_cast<double>(weights[i]);
    }
    below[c] += end < kTileKeys ? sum : static_cast<double>(mass);
  }
}

template <Storage kStorage, int R>
void weigh_rows(const Gather& gather, const Tile& tile, int row, Scratch& scratch) {
  const std::uint64_t* mask = tile.mask + row;
  std::uint64_t any = 0;
  for (int r = 0; r < R; ++r) any |= mask[r];
  if (any == 0) return;
  const int first = first_group(any), last = end_group(any);
  alignas(64) Matrix<float, R, kTileKeys> x;
  score_rows<kStorage, R>(*gather.block, tile, row, first, last, x);
  for (int r = 0; r < R; ++r) {
    if (mask[r] == 0) continue;
    const RowSums sums = weigh(gather, row + r, mask[r], first, last, x[r], scratch);
    add_below_cuts(gather, row + r, tile.begin, first, last, sums.mass, x[r]);
    gather.mass[row + r] += static_cast<double>(sums.mass);
    gather.information[row + r] += static_cast<double>(sums.information);
  }
}

// log2 of x > 0 and normal, within 2 ulp of the result or 1e-7: x = m 2^e with m in [2/3, 4/3), and log m = 2 atanh(s).
BASIN_INLINE V log2(V x) {
  const D d;
  const DI di;
  const auto bits = hn::BitCast(di, x);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f2aaaab)));  // 2/3
  const V m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(exponent)));
  const V s = hn::Div(hn::Sub(m, hn::Set(d, 1.0f)), hn::Add(m, hn::Set(d, 1.0f)));
  const V z = hn::Mul(s, s);
  constexpr float kTwoLog2E = 2.885390081777927f;
  V p = hn::Set(d, kTwoLog2E / 9.0f);
  p = hn::MulAdd(p, z, hn::Set(d, kTwoLog2E / 7.0f));
  p = hn::MulAdd(p, z, hn::Set(d, kTwoLog2E / 5.0f));
  p = hn::MulAdd(p, z, hn::Set(d, kTwoLog2E / 3.0f));
  p = hn::MulAdd(p, z, hn::Set(d, kTwoLog2E));
  return hn::MulAdd(p, s, hn::ConvertTo(d, exponent));
}

// x log2 x, 0 at 0.
BASIN_INLINE F16 information_of(const F16& x) {
  const V smallest = hn::Set(D(), 1.17549435e-38f);
  return make([&](auto i) BASIN_LAMBDA { return hn::Mul(x.part[i], log2(larger(x.part[i], smallest))); });
}

// Hands the tile's sums on.
BASIN_INLINE void flush(const Gather& gather, std::int64_t begin, std::int64_t end, const Scratch& scratch) {
  const int keys = end - begin < kTileKeys ? static_cast<int>(end - begin) : kTileKeys;
  for (int head = 0; head < gather.group; ++head) {
    const float* column = scratch.column[head];
    double* position = gather.position + head * gather.key_stride + begin;
    for (int i = 0; i < keys; ++i) position[i] += static_cast<double>(column[i]);
    float* map = gather.map + head * gather.map_stride;
    for (int i = 0; i < keys;) {
      const std::int64_t bin = (begin + i) / gather.key_bin;
      std::int64_t stop = (bin + 1) * gather.key_bin - begin;
      if (stop > keys) stop = keys;
      Array<float, 4> sum = {};  // additions that need not wait for one another
      for (; i + 4 <= stop; i += 4) {
        for (int j = 0; j < 4; ++j) sum[j] += column[i + j];
      }
      for (; i < stop; ++i) sum[0] += column[i];
      map[bin] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    // Entry i holds the keys at the distance farthest - i.
    const std::int64_t farthest = gather.first_position - begin + gather.queries - 1;
    double* distance = gather.distance + (head + 1) * gather.key_stride - 1 - farthest;
    std::int64_t diagonals = kTileKeys + gather.queries - 1;
    if (diagonals > farthest + 1) diagonals = farthest + 1;  // keys behind all queries
    for (std::int64_t i = 0; i < diagonals; ++i)
      distance[i] += static_cast<double>(scratch.diagonal[head][i]);
  }
  const F16 factor = set(1.0f / static_cast<float>(gather.group));
  for (int query = 0; query < gather.queries; ++query) {
    const int list = gather.queries * gather.group + query;
    F16 information = set(0.0f);
    for (int g = 0; g < kTileKeys; g += kLanes) {
      const F16 share = mul(load(scratch.mean[query] + g), factor);
      information = add(information, information_of(share));
      gather.list_count[list] +=
          append(share, gather.keep[list], gather.list[list] + gather.list_count[list]);
    }
    gather.mean_information[query] += static_cast<double>(sum_of_lanes(information));
    if (gather.mean == nullptr) continue;
    float* mean = gather.mean + query * gather.mean_stride + begin;
    for (int i = 0; i < keys; ++i) mean[i] += scratch.mean[query][i] * gather.mean_factor;
  }
}

template <Storage kStorage>
void gather_keys(const Gather& gather, std::int64_t end, Scratch& scratch) {
  const Block& block = *gather.block;
  Found found;
  found.mask = scratch.mask;
  std::int64_t begin = 0;
  while (find_tile(block, begin, end, found)) {
    begin = found.begin + kTileKeys;
    pack_tile<kStorage>(found, block.d_qk, scratch.keys);
    __builtin_memset(scratch.column, 0, sizeof(scratch.column[0]) * static_cast<std::size_t>(gather.group));
    __builtin_memset(scratch.diagonal, 0,
                     sizeof(scratch.diagonal[0]) * static_cast<std::size_t>(gather.group));
    __builtin_memset(scratch.mean, 0, sizeof(scratch.mean[0]) * static_cast<std::size_t>(gather.queries));
    const Tile tile = {found.begin, scratch.keys, {nullptr, 0}, found.mask};
    for (int row = 0; row < block.rows; row += kMaxRows) {
      const int left = block.rows - row;
      with_rows(left < kMaxRows ? left : kMaxRows,
                [&](auto rows) BASIN_LAMBDA { weigh_rows<kStorage, rows>(gather, tile, row, scratch); });
    }
    flush(gather, found.begin, end, scratch);
  }
}

void run_gather(const Gather& gather, std::int64_t end, void* scratch) {
  Scratch& memory = *static_cast<Scratch*>(scratch);
  switch (gather.block->storage) {
    case Storage::f32:
      return gather_keys<Storage::f32>(gather, end, memory);
    case Storage::f16:
      return gather_keys<Storage::f16>(gather, end, memory);
    case Storage::bf16:
      return gather_keys<Storage::bf16>(gather, end, memory);
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

}  // namespace
}  // namespace basin::probe::cpu::BASIN_TARGET

namespace basin::probe::cpu {

Kernel kernel(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
  return {sizeof(Scratch), run_gather, run_pack_queries, count_budgets};
}

}  // namespace basin::probe::cpu
