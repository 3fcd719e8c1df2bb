// Sparse attention: which heads of which query a task takes, and the set of keys that the query sees.
#include <algorithm>
#include <array>
#include <vector>

#include "attention/cpu/host.h"
#include "attention/cpu/sparse_kernel.h"
#include "base/choose_kernels.h"
#include "base/scratch_buffer.h"
#include "basin/attention/cpu.h"
#include "basin/base/error.h"

namespace basin::attention::cpu {
namespace {

const SparseKernel& kernel() {
  static const SparseKernel chosen = choose_kernels([](auto target) { return sparse_kernel(target); });
  return chosen;
}

struct Query {
  const Sequence* sequence;
  std::int64_t number;  // within its sequence
};

// The words of a query's keys, bit i of word w = key kTileKeys * w + i.
class SeenKeys {
 public:
  void fill(const Forward& problem, const Selection& selection, const Query& query) {
    const Visible visible = visible_to(problem.spec.mask, *query.sequence, query.number);
    const std::int64_t end = std::max({std::int64_t{0}, visible.a_end, visible.b_end});
    words_.assign(static_cast<std::size_t>(ceil_div(end, kTileKeys)), 0);
    if (selection.indices == nullptr) {
      set(0, visible.a_end);
      set(visible.b_begin, visible.b_end);
      return;
    }
    const std::int64_t row = query.sequence->q_begin + query.number;
    const std::int32_t* index = selection.indices + row * selection.topk;
    const std::int64_t count = selection.lengths == nullptr ? selection.topk : selection.lengths[row];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t key = index[i];
      const bool seen = key < visible.a_end || (key >= visible.b_begin && key < visible.b_end);
      if (key >= 0 && seen) word(key) |= bit(key);
    }
  }

  const std::uint64_t* data() const { return words_.data(); }
  std::int64_t size() const { return static_cast<std::int64_t>(words_.size()); }

 private:
  static std::uint64_t bit(std::int64_t key) {
    return std::uint64_t{1} << static_cast<unsigned>(key % kTileKeys);
  }
  std::uint64_t& word(std::int64_t key) { return words_[static_cast<std::size_t>(key / kTileKeys)]; }

  void set(std::int64_t begin, std::int64_t end) {
    for (; begin < end && begin % kTileKeys != 0; ++begin) word(begin) |= bit(begin);
    for (; begin + kTileKeys <= end; begin += kTileKeys) word(begin) = ~std::uint64_t{0};
    for (; begin < end; ++begin) word(begin) |= bit(begin);
  }

  std::vector<std::uint64_t> words_;
};

// Queries that a task takes one kv head after the other, so that the keys which they share are found in a cache.
constexpr std::int64_t kTaskQueries = 16;

// Kept by its thread.
struct Workspace {
  std::array<SeenKeys, kTaskQueries> seen;
  ScratchBuffer<float> queries, sink_queries, acc, kernel_scratch;
};

// One pass over a query's keys: `rows` heads of one kv head, from query head `head` on.
void run_rows(const Forward& p, const Query& query, const SeenKeys& seen, std::int64_t head, int rows,
              Workspace& memory) {
  const std::int64_t h_kv = p.k.shape[static_cast<std::size_t>(p.k.rank - 2)];
  const std::int64_t kv_head = head / (p.q.shape[1] / h_kv), token = query.sequence->q_begin + query.number;
  SparseRows to{};
  to.storage = storage(p.q.dtype);
  to.d_qk = static_cast<int>(p.q.shape[2]);
  to.d_v = static_cast<int>(p.out.shape[2]);
  to.rows = rows;
  to.sink_tokens = p.spec.mask.sink_tokens;
  to.seen = seen.data();
  to.words = seen.size();
  to.k = key_rows(p.k, *query.sequence, kv_head);
  to.v = key_rows(p.v, *query.sequence, kv_head);
  Block arithmetic{};
  set_arithmetic(p.spec, arithmetic);
  to.score_scale = arithmetic.score_scale;
  to.softcap = arithmetic.softcap;
  const auto pack = [&](const ConstView& view, ScratchBuffer<float>& buffer) {
    std::array<const std::byte*, kSparseRows> row;
    for (int r = 0; r < rows; ++r) {
      row[static_cast<std::size_t>(r)] =
          bytes(view) + (token * view.stride[0] + (head + r) * view.stride[1]) * block_bytes(view.dtype);
    }
    float* packed = buffer.at_least(kSparseRows * kMaxSparseHead);
    kernel().pack_heads(to.storage, to.d_qk, rows, row.data(), packed);
    return packed;
  };
  to.q = pack(p.q, memory.queries);
  if (p.q_sink && p.spec.mask.sink_tokens > 0) to.q_sink = pack(p.q_sink, memory.sink_queries);

  std::array<float, kSparseRows> m, l;
  float* acc = memory.acc.at_least(kSparseRows * kMaxSparseHead);
  kernel().run(to, m.data(), l.data(), acc,
               memory.kernel_scratch.at_least(kernel().scratch_bytes / sizeof(float)));
  for (int r = 0; r < rows; ++r) {
    finish_row(p, token, head + r, m[static_cast<std::size_t>(r)], l[static_cast<std::size_t>(r)],
               acc + r * p.out.shape[2]);
  }
}

}  // namespace

std::string supported(const Forward& problem, const Selection&) {
  return unsupported_views(problem, kMaxSparseHead);
}

void forward(const Forward& p, const Selection& selection, ThreadPool& pool) {
  if (const std::string reason = supported(p, selection); !reason.empty())
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
  constexpr std::int64_t kSerialWork = 300'000;  // multiply-adds that take about as long as waking a thread
  std::vector<Query> queries;
  std::int64_t work = 0;
  for (const Sequence& sequence : p.sequences) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) queries.push_back({&sequence, i});
    const bool selected = selection.indices != nullptr;
    const std::int64_t keys = selected ? std::min(sequence.kv_tokens, selection.topk) : sequence.kv_tokens;
    work += sequence.q_tokens * keys * p.q.shape[1] * (p.q.shape[2] + p.out.shape[2]);
  }
  // Heads are cut finer, and given to several tasks, where there are few queries (decode).
  const std::int64_t h_kv = p.k.shape[static_cast<std::size_t>(p.k.rank - 2)], group = p.q.shape[1] / h_kv;
  const auto count = static_cast<std::int64_t>(queries.size());
  const bool serial = pool.threads() == 1 || work < kSerialWork;
  const bool few = !serial && count < 4 * pool.threads();
  const std::int64_t wide = few && count * h_kv * ceil_div(group, kSparseRows) < 2 * pool.threads()
                                ? std::int64_t{kLanes}
                                : std::int64_t{kSparseRows};
  const std::int64_t blocks = ceil_div(group, wide), passes = h_kv * blocks;
  const std::int64_t pieces =
      few ? std::min(passes, ceil_div(4 * pool.threads(), std::max<std::int64_t>(count, 1))) : 1;
  const std::int64_t together = std::clamp<std::int64_t>(count / (4 * pool.threads()), 1, kTaskQueries);
  const auto run_task = [&](std::int64_t task, int) {
    thread_local Workspace memory;
    const std::int64_t begin = task / pieces * together, end = std::min(begin + together, count);
    const std::int64_t piece = task % pieces;
    const auto each_query = [&](const auto& body) {
      for (std::int64_t i = begin; i < end; ++i)
        body(queries[static_cast<std::size_t>(i)], memory.seen[static_cast<std::size_t>(i - begin)]);
    };
    each_query([&](const Query& query, SeenKeys& seen) { seen.fill(p, selection, query); });
    for (std::int64_t pass = piece * passes / pieces; pass < (piece + 1) * passes / pieces; ++pass) {
      const std::int64_t first = pass % blocks * wide;
      each_query([&](const Query& query, const SeenKeys& seen) {
        run_rows(p, query, seen, pass / blocks * group + first,
                 static_cast<int>(std::min(wide, group - first)), memory);
      });
    }
  };
  const std::int64_t tasks = ceil_div(count, together) * pieces;
  if (!serial) return pool.parallel_for(tasks, run_task);
  for (std::int64_t task = 0; task < tasks; ++task) run_task(task, 0);
}

}  // namespace basin::attention::cpu
