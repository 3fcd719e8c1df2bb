#include "basin/attention/cpu.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <vector>

#include "attention/cpu/host.h"
#include "base/choose_kernels.h"
#include "base/scratch_buffer.h"
#include "basin/base/error.h"

namespace basin::attention::cpu {
namespace {

const Kernel& kernel() {
  static const Kernel chosen = choose_kernels([](auto target) { return cpu::kernel(target); });
  return chosen;
}

using Buffer = ScratchBuffer<float>;  // kept by its thread

// Rows of one sequence that are handled together, for some kv heads. Rows of a kv head are numbered query-major:
// row = query * group + head in group. `rows` counts those of one kv head.
struct Item {
  std::int64_t sequence;
  std::int64_t kv_head;  // first
  int heads;             // kv heads
  std::int64_t row_begin;
  int rows;
  // Segments with a visible key: [0, a_segments) and [b_first, b_last), without overlap.
  std::int64_t a_segments, b_first, b_last;
  std::int64_t keys;        // an upper bound of the keys any of its rows sees, to estimate work
  std::int64_t first_part;  // index of its first segment's state when segments are spread over threads

  int all_rows() const { return heads * rows; }
  std::int64_t segments() const { return a_segments + (b_last - b_first); }
  std::int64_t segment(std::int64_t i) const { return i < a_segments ? i : b_first + (i - a_segments); }
};

struct Call {
  const Forward& problem;
  std::int64_t group;
  std::int64_t d_qk, d_v;
  Storage storage;

  explicit Call(const Forward& p)
      : problem(p),
        group(p.q.shape[1] / p.k.shape[p.k.rank == 4 ? 2 : 1]),
        d_qk(p.q.shape[2]),
        d_v(p.out.shape[2]),
        storage(cpu::storage(p.q.dtype)) {}

  std::int64_t row_floats() const { return 1 + kLanes + d_v; }  // of a State
};

void find_segments(const Mask& mask, const Sequence& sequence, std::int64_t group, Item& item) {
  std::int64_t a_end = 0, b_begin = sequence.kv_tokens, b_end = 0;
  for (std::int64_t i = item.row_begin / group; i <= (item.row_begin + item.rows - 1) / group; ++i) {
    const Visible v = visible_to(mask, sequence, i);
    a_end = std::max(a_end, v.a_end);
    if (v.b_end <= v.b_begin) continue;
    b_begin = std::min(b_begin, v.b_begin);
    b_end = std::max(b_end, v.b_end);
  }
  item.keys = a_end + std::max<std::int64_t>(b_end - b_begin, 0);
  item.a_segments = ceil_div(a_end, kSegmentKeys);
  item.b_first = item.b_last = item.a_segments;
  if (b_end <= b_begin) return;
  item.b_first = std::max(b_begin / kSegmentKeys, item.a_segments);
  item.b_last = std::max(ceil_div(b_end, kSegmentKeys), item.b_first);
}

// Few rows (decode) take as many kv heads at once as leave every thread something to do, so that keys and values are
// read in the order of memory; many rows take one, so that its tile stays in the nearest cache.
int heads_at_once(std::int64_t h_kv, std::int64_t rows, std::int64_t keys, int threads) {
  if (rows > kFewRows) return 1;
  const std::int64_t segments = std::max<std::int64_t>(1, ceil_div(keys, kSegmentKeys));
  const std::int64_t pieces = std::min(h_kv, ceil_div(2 * threads, segments));
  return static_cast<int>(std::min(ceil_div(h_kv, pieces), kMaxBlockRows / rows));
}

std::vector<Item> plan(const Call& call, int threads) {
  std::vector<Item> items;
  const std::int64_t h_kv = call.problem.q.shape[1] / call.group;
  for (std::size_t s = 0; s < call.problem.sequences.size(); ++s) {
    const Sequence& sequence = call.problem.sequences[s];
    const std::int64_t rows = sequence.q_tokens * call.group;
    for (std::int64_t begin = 0; begin < rows; begin += kMaxBlockRows) {
      Item item{};
      item.sequence = static_cast<std::int64_t>(s);
      item.row_begin = begin;
      item.rows = static_cast<int>(std::min<std::int64_t>(kMaxBlockRows, rows - begin));
      find_segments(call.problem.spec.mask, sequence, call.group, item);
      const int at_once = heads_at_once(h_kv, item.rows, item.keys, threads);
      for (item.kv_head = 0; item.kv_head < h_kv; item.kv_head += at_once) {
        item.heads = static_cast<int>(std::min<std::int64_t>(at_once, h_kv - item.kv_head));
        items.push_back(item);
      }
    }
  }
  return items;
}

std::int64_t head_bytes(const ConstView& view) {
  return view.stride[view.rank == 4 ? 2 : 1] * block_bytes(view.dtype);
}

State state_at(float* memory, int rows) {
  return {memory, memory + rows, memory + static_cast<std::int64_t>(rows) * (1 + kLanes)};
}

// The query and head of a row of an item; its rows are those of the first kv head, then of the next.
struct RowPlace {
  std::int64_t token;  // row in q and out
  std::int64_t head;   // query head
};

RowPlace place(const Call& call, const Item& item, int row) {
  const std::int64_t r = item.row_begin + row % item.rows;
  const std::int64_t kv_head = item.kv_head + row / item.rows;
  const Sequence& sequence = call.problem.sequences[static_cast<std::size_t>(item.sequence)];
  return {sequence.q_begin + r / call.group, kv_head * call.group + r % call.group};
}

// Per-thread memory.
struct Workspace {
  Buffer kernel_scratch, queries, sink_queries, segment, total, parts;
};

Workspace& workspace() {
  thread_local Workspace memory;
  return memory;
}

// Fills everything of the kernel's block but lets `visible` live in the caller.
Block make_block(const Call& call, const Item& item, std::array<Visible, kMaxBlockRows>& visible_rows,
                 Workspace& memory) {
  const Forward& p = call.problem;
  const Sequence& sequence = p.sequences[static_cast<std::size_t>(item.sequence)];
  Block block{};
  block.storage = call.storage;
  block.d_qk = static_cast<int>(call.d_qk);
  block.d_v = static_cast<int>(call.d_v);
  block.heads = item.heads;
  block.rows = item.rows;
  block.sink_tokens = p.spec.mask.sink_tokens;
  block.k = key_rows(p.k, sequence, item.kv_head);
  block.v = key_rows(p.v, sequence, item.kv_head);
  block.k_head_bytes = head_bytes(p.k);
  block.v_head_bytes = head_bytes(p.v);
  set_arithmetic(p.spec, block);
  for (int r = 0; r < item.rows; ++r) {
    visible_rows[static_cast<std::size_t>(r)] =
        visible_to(p.spec.mask, sequence, (item.row_begin + r) / call.group);
  }
  block.visible = visible_rows.data();

  const auto pack = [&](const ConstView& view, Buffer& buffer) -> const void* {
    std::array<const std::byte*, kMaxBlockRows> row;
    for (int r = 0; r < item.all_rows(); ++r) {
      const RowPlace at = place(call, item, r);
      row[static_cast<std::size_t>(r)] =
          bytes(view) + (at.token * view.stride[0] + at.head * view.stride[1]) * block_bytes(view.dtype);
    }
    float* to = buffer.at_least(static_cast<std::size_t>(item.all_rows() * call.d_qk));
    kernel().pack_queries(call.storage, block.d_qk, item.all_rows(), row.data(), to);
    return to;
  };
  block.q = pack(p.q, memory.queries);
  // Only keys before sink_tokens use the second query, and only segment 0 on has them.
  if (p.q_sink && p.spec.mask.sink_tokens > 0) block.q_sink = pack(p.q_sink, memory.sink_queries);
  return block;
}

void finish_rows(const Call& call, const Item& item, const State& total) {
  for (int r = 0; r < item.all_rows(); ++r) {
    const RowPlace at = place(call, item, r);
    finish_row(call.problem, at.token, at.head, total.m[r], total.l[static_cast<std::int64_t>(r) * kLanes],
               total.acc + r * call.d_v);
  }
}

// One thread runs all segments of the item and folds as it goes.
void run_item(const Call& call, const Item& item) {
  Workspace& memory = workspace();
  std::array<Visible, kMaxBlockRows> visible_rows;
  const Block block = make_block(call, item, visible_rows, memory);
  const auto floats = static_cast<std::size_t>(item.all_rows() * call.row_floats());
  const State segment = state_at(memory.segment.at_least(floats), item.all_rows());
  const State total = state_at(memory.total.at_least(floats), item.all_rows());
  float* scratch = memory.kernel_scratch.at_least(kernel().scratch_bytes / sizeof(float));
  kernel().clear(item.all_rows(), block.d_v, total);
  for (std::int64_t i = 0; i < item.segments(); ++i) {
    const std::int64_t begin = item.segment(i) * kSegmentKeys;
    kernel().clear(item.all_rows(), block.d_v, segment);
    const std::int64_t next = i + 1 < item.segments() ? item.segment(i + 1) * kSegmentKeys : -1;
    kernel().segment(block, begin, begin + kSegmentKeys, next, segment, scratch);
    kernel().fold(item.all_rows(), block.d_v, segment, total);
  }
  finish_rows(call, item, total);
}

// Segment `i` of the item; its state is kept for the fold. This thread is likely to take segment `next` afterwards.
void run_part(const Call& call, const Item& item, std::int64_t i, std::int64_t next, float* part) {
  Workspace& memory = workspace();
  std::array<Visible, kMaxBlockRows> visible_rows;
  const Block block = make_block(call, item, visible_rows, memory);
  const State segment = state_at(part, item.all_rows());
  float* scratch = memory.kernel_scratch.at_least(kernel().scratch_bytes / sizeof(float));
  const std::int64_t begin = item.segment(i) * kSegmentKeys;
  kernel().clear(item.all_rows(), block.d_v, segment);
  const std::int64_t next_begin = next < item.segments() ? item.segment(next) * kSegmentKeys : -1;
  kernel().segment(block, begin, begin + kSegmentKeys, next_begin, segment, scratch);
}

void fold_parts(const Call& call, const Item& item, float* const* part) {
  Workspace& memory = workspace();
  const auto floats = static_cast<std::size_t>(item.all_rows() * call.row_floats());
  const State total = state_at(memory.total.at_least(floats), item.all_rows());
  kernel().clear(item.all_rows(), static_cast<int>(call.d_v), total);
  for (std::int64_t i = 0; i < item.segments(); ++i) {
    kernel().fold(item.all_rows(), static_cast<int>(call.d_v),
                  state_at(part[item.first_part + i], item.all_rows()), total);
  }
  finish_rows(call, item, total);
}

}  // namespace

std::string supported(const Forward& p) {
  return unsupported_views(p, kMaxHead);
}

std::string_view target_name() {
  return name(cpu_target());
}

void forward(const Forward& problem, ThreadPool& pool) {
  if (const std::string reason = supported(problem); !reason.empty()) {
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
  }
  const Call call(problem);
  std::vector<Item> items = plan(call, pool.threads());

  // Spread segments over threads when there are few items: a decode step has one item per sequence and kv head.
  // Which way is taken does not touch the result. Parts are bounded, since a long prefill does not need them.
  constexpr std::int64_t kItemsPerThread = 8;
  constexpr std::int64_t kMaxPartFloats = std::int64_t{8} << 20;
  constexpr std::int64_t kSerialWork = 300'000;  // multiply-adds that take about as long as waking a thread
  std::int64_t work = 0, parts = 0, part_floats = 0;
  for (Item& item : items) {
    item.first_part = parts;
    parts += item.segments();
    part_floats += item.segments() * item.all_rows() * call.row_floats();
    work += item.keys * item.all_rows() * (call.d_qk + call.d_v);
  }
  const auto count = static_cast<std::int64_t>(items.size());
  if (pool.threads() == 1 || work < kSerialWork) {
    for (const Item& item : items) run_item(call, item);
    return;
  }
  const bool split =
      count < kItemsPerThread * pool.threads() && parts > count && part_floats <= kMaxPartFloats;
  if (!split) {
    pool.parallel_for(count,
                      [&](std::int64_t i, int) { run_item(call, items[static_cast<std::size_t>(i)]); });
    return;
  }
  float* memory = workspace().parts.at_least(static_cast<std::size_t>(part_floats));
  std::vector<float*> part;
  std::vector<const Item*> owner;
  for (const Item& item : items) {
    for (std::int64_t i = 0; i < item.segments(); ++i) {
      part.push_back(memory);
      owner.push_back(&item);
      memory += item.all_rows() * call.row_floats();
    }
  }
  pool.parallel_for(parts, [&](std::int64_t i, int) {
    const Item& item = *owner[static_cast<std::size_t>(i)];
    const std::int64_t segment = i - item.first_part;
    run_part(call, item, segment, segment + pool.threads(), part[static_cast<std::size_t>(i)]);
  });
  for (const Item& item : items) fold_parts(call, item, part.data());
}

}  // namespace basin::attention::cpu
