// The micro-kernels of sparse attention. One source for every target.
//
// Heads lie in lanes, so that a key is broadcast and never transposed: keys far apart cost no more than neighbours. Where heads are
// too few to fill the lanes, the keys of a batch are transposed for their scores, whatever lies between them. Seen keys are
// taken up to kTileKeys at a time, in whole tiles; a run is what one of these tiles has of them.
#include "attention/cpu/sparse_kernel.h"

#include "attention/cpu/tile.h"

namespace basin::attention::cpu::BASIN_TARGET {
namespace {

// Heads up to which transposing sixteen keys costs less than the lanes that stay empty: 20 operations a key and 6 a head at d = 128,
// against 128 for up to sixteen heads.
constexpr int kFewHeads = 8;

struct SparseScratch {
  alignas(64) float keys[kTileKeys * kMaxSparseHead];  // transposed, for few heads
  alignas(64) float x[kTileKeys][kSparseRows];         // scores, then probabilities rounded to V's type
  alignas(64) float rescale[kTileKeys][kSparseRows];   // of each run
  alignas(64) float m[kSparseRows];
  alignas(64) float l[kLanes][kSparseRows];
  alignas(64) float acc[kSparseRows * kMaxSparseHead];
  alignas(64) float wide[kMaxRows][kMaxSparseHead];
};

// Some seen keys of one segment, ascending.
struct Batch {
  std::int64_t segment = 0;
  int keys = 0, runs = 0;
  int run_end[kTileKeys];
  std::int64_t position[kTileKeys];
  const std::byte* key[kTileKeys];
  const std::byte* value[kTileKeys];
};

BASIN_INLINE const std::byte* row_of(const KeyRows& rows, std::int64_t position) {
  if (rows.page_tokens == 0) return rows.base + position * rows.row_bytes;
  return rows.base + rows.pages[position / rows.page_tokens] * rows.page_bytes +
         position % rows.page_tokens * rows.row_bytes;
}

// Takes whole tiles from `word` on while they fit. False at the end.
BASIN_INLINE bool take_batch(const SparseRows& rows, std::int64_t& word, Batch& batch) {
  constexpr std::int64_t kSegmentWords = kSegmentKeys / kTileKeys;
  batch.keys = batch.runs = 0;
  for (; word < rows.words; ++word) {
    std::uint64_t left = rows.seen[word];
    if (left == 0) continue;
    if (batch.keys == 0) batch.segment = word / kSegmentWords;
    if (word / kSegmentWords != batch.segment || batch.keys + __builtin_popcountll(left) > kTileKeys) break;
    for (; left != 0; left &= left - 1) {
      const std::int64_t position = word * kTileKeys + __builtin_ctzll(left);
      batch.position[batch.keys] = position;
      batch.key[batch.keys] = row_of(rows.k, position);
      batch.value[batch.keys++] = row_of(rows.v, position);
    }
    batch.run_end[batch.runs++] = batch.keys;
  }
  return batch.keys > 0;
}

// Asks for some rows of a batch while the one before it is computed: keys far apart are found by no hardware prefetcher. They go
// to the second cache; the first has not room for two batches.
BASIN_INLINE void fetch(const std::byte* const* row, int count, int bytes) {
  constexpr int kLine = 64, kSecondCache = 2;
  for (int i = 0; i < count; ++i) {
    for (int at = 0; at < bytes; at += kLine) __builtin_prefetch(row[i] + at, 0, kSecondCache);
  }
}

// Step s of a key, in every lane. Words of 4 bytes lie in memory as a step wants them, but not always aligned.
BASIN_INLINE F16 broadcast_step(const std::byte* key, int s) {
  float step;
  __builtin_memcpy(&step, key + 4 * static_cast<std::ptrdiff_t>(s), 4);
  return set(step);
}

// Scores of R keys for G groups of heads; q is [G, n, kLanes].
template <Storage kStorage, int R, int G>
BASIN_INLINE void score_keys(const std::byte* const* key, const float* q, int n, float (*out)[kSparseRows]) {
  Matrix<F16, R, G> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA { unroll<G>([&](auto g) BASIN_LAMBDA { sum[r][g] = set(0.0f); }); });
  for (int s = 0; s < n; ++s) {
    Array<F16, G> query;
    unroll<G>([&](auto g) BASIN_LAMBDA { query[g] = load(q + (g * n + s) * kLanes); });
    unroll<R>([&](auto r) BASIN_LAMBDA {
      const F16 step = broadcast_step(key[r], s);
      unroll<G>([&](auto g) BASIN_LAMBDA { sum[r][g] = score_step<kStorage>(query[g], step, sum[r][g]); });
    });
  }
  unroll<R>([&](auto r) BASIN_LAMBDA {
    unroll<G>([&](auto g) BASIN_LAMBDA { store(sum[r][g], out[r] + g * kLanes); });
  });
}

// The same with keys in lanes, for few heads; q is [rows, n].
template <Storage kStorage>
void score_few_heads(const SparseRows& rows, const Batch& batch, int first, int last, const float* q,
                     SparseScratch& scratch) {
  const int n = steps<kStorage>(rows.d_qk), groups = (last - first + kLanes - 1) / kLanes;
  const std::byte* key[kTileKeys];
  for (int i = 0; i < groups * kLanes; ++i) key[i] = batch.key[first + i < last ? first + i : first];
  for (int g = 0; g < groups; ++g)
    pack_group<kStorage>(key + g * kLanes, 0, rows.d_qk,
                         scratch.keys + static_cast<std::ptrdiff_t>(g) * n * kLanes);
  for (int row = 0; row < rows.rows; row += kMaxRows) {
    const int left = rows.rows - row;
    with_rows(left < kMaxRows ? left : kMaxRows, [&](auto r) BASIN_LAMBDA {
      alignas(64) Matrix<float, r, kTileKeys> x;
      score_groups<kStorage, r>(q + static_cast<std::ptrdiff_t>(row) * n, n, scratch.keys, 0, groups, x);
      for (int i = first; i < last; ++i)
        unroll<r>([&](auto head) BASIN_LAMBDA { scratch.x[i][row + head] = x[head][i - first]; });
    });
  }
}

template <Storage kStorage>
void score_batch(const SparseRows& rows, const Batch& batch, int first, int last, const void* queries,
                 SparseScratch& scratch) {
  if (rows.rows <= kFewHeads) {
    return score_few_heads<kStorage>(rows, batch, first, last, static_cast<const float*>(queries), scratch);
  }
  const int n = steps<kStorage>(rows.d_qk);
  const int groups = (rows.rows + kLanes - 1) / kLanes;
  const float* q = static_cast<const float*>(queries);
  for (int begin = first; begin < last; begin += kMaxRows) {
    const int count = last - begin < kMaxRows ? last - begin : kMaxRows;
    const std::byte* key[kMaxRows];
    for (int r = 0; r < count; ++r) {
      key[r] = batch.key[begin + r];
      if constexpr (kStorage != Storage::f32 && !pair_dots<kStorage>()) {
        for (int d = 0; d < rows.d_qk; d += kLanes)
          store(load_stored<kStorage>(key[r] + stored_bytes<kStorage>() * d), scratch.wide[r] + d);
        key[r] = reinterpret_cast<const std::byte*>(scratch.wide[r]);
      }
    }
    with_rows(count, [&](auto r) BASIN_LAMBDA {
      const auto packed = [&](int g) { return q + static_cast<std::ptrdiff_t>(g) * n * kLanes; };
      const auto to = [&](int g) {
        return reinterpret_cast<float(*)[kSparseRows]>(scratch.x[begin] + g * kLanes);
      };
      int g = 0;
      for (; g + kMaxGroups <= groups; g += kMaxGroups)
        score_keys<kStorage, r, kMaxGroups>(key, packed(g), n, to(g));
      if constexpr (kMaxGroups > 1) {
        for (; g < groups; ++g) score_keys<kStorage, r, 1>(key, packed(g), n, to(g));
      }
    });
  }
}

BASIN_INLINE F16 zero_where_no_key(const F16& m) {
  const V none = hn::Set(D(), -__builtin_inff());
  return make([&](auto i)
                  BASIN_LAMBDA { return hn::IfThenElse(hn::Eq(m.part[i], none), hn::Zero(D()), m.part[i]); });
}

// A product with 1 changes nothing.
BASIN_INLINE bool all_one(const F16& a) {
  const V one = hn::Set(D(), 1.0f);
  bool all = true;
  unroll<kParts>([&](auto i) BASIN_LAMBDA { all &= hn::AllTrue(D(), hn::Eq(a.part[i], one)); });
  return all;
}

// Scores to probabilities, run by run, for one group of heads.
template <Storage kStorage>
BASIN_INLINE void softmax_group(const SparseRows& rows, const Batch& batch, int at, SparseScratch& scratch) {
  const F16 scale = set(rows.score_scale);
  const F16 cap = set(rows.softcap);
  F16 m = load(scratch.m + at);
  for (int run = 0, begin = 0; run < batch.runs; begin = batch.run_end[run++]) {
    F16 largest = set(-__builtin_inff());
    for (int i = begin; i < batch.run_end[run]; ++i) {
      F16 s = mul(load(scratch.x[i] + at), scale);
      if (rows.softcap != 0.0f) s = mul(tanh(s), cap);
      store(s, scratch.x[i] + at);
      largest = max(largest, s);
    }
    const F16 old = m;
    m = max(largest, m);
    const F16 reference = zero_where_no_key(m);
    const F16 factor = exp2(sub(old, reference));
    store(factor, scratch.rescale[run] + at);
    if (!all_one(factor)) {
      for (int lane = 0; lane < kLanes; ++lane)
        store(mul(load(scratch.l[lane] + at), factor), scratch.l[lane] + at);
    }
    for (int i = begin; i < batch.run_end[run]; ++i) {
      const F16 p = exp2(sub(load(scratch.x[i] + at), reference));
      float* l = scratch.l[batch.position[i] % kLanes] + at;
      store(add(load(l), p), l);
      store(round_probability<kStorage>(p), scratch.x[i] + at);
    }
  }
  store(m, scratch.m + at);
}

// acc[row + r][d .. d + 16 NV) of R heads.
template <Storage kStorage, int R, int NV>
BASIN_INLINE void accumulate_rows(const SparseRows& rows, const Batch& batch, int row, int d,
                                  const bool* rescaled, SparseScratch& scratch) {
  float* acc = scratch.acc + static_cast<std::ptrdiff_t>(row) * rows.d_v + d;
  Matrix<F16, R, NV> sum;
  unroll<R>([&](auto r) BASIN_LAMBDA {
    unroll<NV>([&](auto i) BASIN_LAMBDA { sum[r][i] = load(acc + r * rows.d_v + i * kLanes); });
  });
  for (int run = 0, key = 0; run < batch.runs; ++run) {
    if (rescaled[run]) {
      unroll<R>([&](auto r) BASIN_LAMBDA {
        const F16 factor = set(scratch.rescale[run][row + r]);
        unroll<NV>([&](auto i) BASIN_LAMBDA { sum[r][i] = mul(sum[r][i], factor); });
      });
    }
    for (; key < batch.run_end[run]; ++key) {
      const std::byte* v = batch.value[key] + static_cast<std::ptrdiff_t>(d) * stored_bytes<kStorage>();
      Array<F16, NV> value;
      unroll<NV>([&](auto i) BASIN_LAMBDA {
        value[i] = load_stored<kStorage>(v + i * kLanes * stored_bytes<kStorage>());
      });
      unroll<R>([&](auto r) BASIN_LAMBDA {
        const F16 weight = set(scratch.x[key][row + r]);
        unroll<NV>([&](auto i) BASIN_LAMBDA { sum[r][i] = fma(weight, value[i], sum[r][i]); });
      });
    }
  }
  unroll<R>([&](auto r) BASIN_LAMBDA {
    unroll<NV>([&](auto i) BASIN_LAMBDA { store(sum[r][i], acc + r * rows.d_v + i * kLanes); });
  });
}

template <Storage kStorage>
void accumulate_batch(const SparseRows& rows, const Batch& batch, SparseScratch& scratch) {
  // Runs that moved no head's maximum change nothing.
  bool rescaled[kTileKeys];
  for (int run = 0; run < batch.runs; ++run) {
    rescaled[run] = false;
    for (int r = 0; r < rows.rows; ++r) rescaled[run] |= scratch.rescale[run][r] != 1.0f;
  }
  int d = 0;
  const auto columns = [&](auto vectors) BASIN_LAMBDA {
    for (int row = 0; row < rows.rows; row += kMaxRows) {
      const int left = rows.rows - row;
      with_rows(left < kMaxRows ? left : kMaxRows, [&](auto r) BASIN_LAMBDA {
        accumulate_rows<kStorage, r, vectors>(rows, batch, row, d, rescaled, scratch);
      });
    }
  };
  for (; d + kMaxGroups * kLanes <= rows.d_v; d += kMaxGroups * kLanes) columns(Index<kMaxGroups>());
  if constexpr (kMaxGroups > 1) {
    for (; d < rows.d_v; d += kLanes) columns(Index<1>());
  }
}

// Merges a segment into the total, as Kernel::fold does.
void fold_segment(const SparseRows& rows, SparseScratch& scratch, float* m, float* l, float* acc) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      for (int r = 0; r < rows.rows; r += kLanes)
        store(add(load(scratch.l[lane] + r), load(scratch.l[lane + half] + r)), scratch.l[lane] + r);
    }
  }
  for (int r = 0; r < rows.rows; ++r) {
    const float m_s = scratch.m[r], l_s = scratch.l[0][r];
    if (m_s == -__builtin_inff() && l_s == 0.0f)
      continue;  // all scores are -inf: exactly nothing (a NaN goes on)
    const float now = m_s > m[r] ? m_s : m[r];
    const F16 a = exp2(sub(set(m[r]), set(now)));
    const F16 b = exp2(sub(set(m_s), set(now)));
    alignas(64) float sum[kLanes];
    store(fma(set(l[r]), a, mul(set(l_s), b)), sum);
    l[r] = sum[0];
    m[r] = now;
    const float* from = scratch.acc + static_cast<std::ptrdiff_t>(r) * rows.d_v;
    float* to = acc + static_cast<std::ptrdiff_t>(r) * rows.d_v;
    for (int d = 0; d < rows.d_v; d += kLanes) store(fma(load(to + d), a, mul(load(from + d), b)), to + d);
  }
}

void clear(int rows, int d_v, float* m, float* l, int l_lanes, float* acc) {
  for (int r = 0; r < kSparseRows; ++r) m[r] = -__builtin_inff();
  __builtin_memset(l, 0, sizeof(float) * static_cast<std::size_t>(kSparseRows * l_lanes));
  __builtin_memset(acc, 0, sizeof(float) * static_cast<std::size_t>(rows * d_v));
}

// Adds the keys of a batch to the segment; meanwhile asks for the values of the next. Not inlined: see kernel.cc.
template <Storage kStorage>
__attribute__((noinline)) void add_batch(const SparseRows& rows, const Batch& batch, const Batch& next,
                                         SparseScratch& scratch) {
  int sinks = 0;
  while (rows.q_sink != nullptr && sinks < batch.keys && batch.position[sinks] < rows.sink_tokens) ++sinks;
  score_batch<kStorage>(rows, batch, 0, sinks, rows.q_sink, scratch);
  score_batch<kStorage>(rows, batch, sinks, batch.keys, rows.q, scratch);
  if (next.keys > 0 && next.value[0] != next.key[0])  // else a latent: its first part
    fetch(next.value, next.keys, rows.d_v * stored_bytes<kStorage>());
  for (int group = 0; group < rows.rows; group += kLanes)
    softmax_group<kStorage>(rows, batch, group, scratch);
  accumulate_batch<kStorage>(rows, batch, scratch);
}

template <Storage kStorage>
void run_rows(const SparseRows& rows, float* m, float* l, float* acc, void* memory) {
  SparseScratch& scratch = *static_cast<SparseScratch*>(memory);
  clear(rows.rows, rows.d_v, m, l, 1, acc);
  if (rows.rows <= kFewHeads) __builtin_memset(scratch.x, 0, sizeof(scratch.x));  // lanes without a head
  Batch batches[2];
  std::int64_t word = 0, segment = -1;
  bool more = take_batch(rows, word, batches[0]);
  for (int at = 0; more; at = 1 - at) {
    const Batch& batch = batches[at];
    Batch& next = batches[1 - at];
    more = take_batch(rows, word, next);
    fetch(next.key, next.keys, rows.d_qk * stored_bytes<kStorage>());
    if (batch.segment != segment) {
      if (segment >= 0) fold_segment(rows, scratch, m, l, acc);
      clear(rows.rows, rows.d_v, scratch.m, scratch.l[0], kLanes, scratch.acc);
      segment = batch.segment;
    }
    const RoundingOfDots<kStorage> rounding;
    add_batch<kStorage>(rows, batch, next, scratch);
  }
  if (segment >= 0) fold_segment(rows, scratch, m, l, acc);
}

template <Storage kStorage>
void pack_rows(int d, int rows, const std::byte* const* row, float* out) {
  if (rows <= kFewHeads) return pack_queries<kStorage>(d, rows, row, out);
  const int n = steps<kStorage>(d);
  for (int begin = 0; begin < rows; begin += kLanes) {
    const std::byte* group[kLanes];
    for (int i = 0; i < kLanes; ++i) group[i] = row[begin + i < rows ? begin + i : rows - 1];
    pack_group<kStorage>(group, 0, d, out + static_cast<std::ptrdiff_t>(begin) * n);
  }
}

struct IndexScratch {
  alignas(64) float keys[kTileKeys * kMaxSparseHead];
};

// Heads [head, head + R) of one query for groups [g, g + G) of the tile: adds weight max(dot, 0) to each sum.
template <Storage kStorage, int R, int G>
BASIN_INLINE void add_heads(const float* q, int n, const float* keys, const float* weight, float* sums) {
  alignas(64) Matrix<float, R, kTileKeys> dot;
  scores<kStorage, R, G>(q, n, keys, dot);
  unroll<G>([&](auto g) BASIN_LAMBDA {
    F16 sum = load(sums + g * kLanes);
    unroll<R>([&](auto r) BASIN_LAMBDA {
      sum = fma(set(weight[r]), max(set(0.0f), load(dot[r] + g * kLanes)), sum);  // a NaN dot stays one
    });
    store(sum, sums + g * kLanes);
  });
}

template <Storage kStorage>
void index_tile(const IndexTile& tile, void* memory) {
  IndexScratch& scratch = *static_cast<IndexScratch*>(memory);
  const int n = steps<kStorage>(tile.d);
  const std::byte* key[kTileKeys];
  find_rows(tile.k, tile.begin, tile.wanted, key);
  for (int g = 0; g < kGroups; ++g) {
    pack_group<kStorage>(key + g * kLanes, 0, tile.d,
                         scratch.keys + static_cast<std::ptrdiff_t>(g) * n * kLanes);
  }
  const float* q = static_cast<const float*>(tile.q);
  for (int query = 0; query < tile.queries; ++query) {
    float* sums = tile.scores + query * tile.row_floats;
    for (int g = 0; g < kGroups; ++g) store(set(0.0f), sums + g * kLanes);
    for (int head = 0; head < tile.heads; head += kMaxRows) {
      const int left = tile.heads - head;
      const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(query) * tile.heads + head;
      with_rows(left < kMaxRows ? left : kMaxRows, [&](auto r) BASIN_LAMBDA {
        for (int g = 0; g < kGroups; g += kMaxGroups) {
          add_heads<kStorage, r, kMaxGroups>(q + row * n, n,
                                             scratch.keys + static_cast<std::ptrdiff_t>(g) * n * kLanes,
                                             tile.weights + row, sums + g * kLanes);
        }
      });
    }
  }
}

// Calls body(Index of the storage).
template <typename Body>
BASIN_INLINE void with_storage(Storage storage, const Body& body) {
  switch (storage) {
    case Storage::f32:
      return body(Index<static_cast<int>(Storage::f32)>());
    case Storage::f16:
      return body(Index<static_cast<int>(Storage::f16)>());
    case Storage::bf16:
      return body(Index<static_cast<int>(Storage::bf16)>());
  }
}

void pack_heads(Storage storage, int d, int rows, const std::byte* const* row, void* out) {
  with_storage(storage, [&](auto s) BASIN_LAMBDA {
    pack_rows<static_cast<Storage>(s.value)>(d, rows, row, static_cast<float*>(out));
  });
}

void run(const SparseRows& rows, float* m, float* l, float* acc, void* scratch) {
  with_storage(rows.storage, [&](auto s) BASIN_LAMBDA {
    run_rows<static_cast<Storage>(s.value)>(rows, m, l, acc, scratch);
  });
}

void index(const IndexTile& tile, void* scratch) {
  with_storage(tile.storage,
               [&](auto s) BASIN_LAMBDA { index_tile<static_cast<Storage>(s.value)>(tile, scratch); });
}

}  // namespace
}  // namespace basin::attention::cpu::BASIN_TARGET

namespace basin::attention::cpu {

SparseKernel sparse_kernel(basin::BASIN_TARGET::Target) {
  using namespace BASIN_TARGET;
  return {sizeof(SparseScratch), sizeof(IndexScratch), pack_heads, run, index};
}

}  // namespace basin::attention::cpu
