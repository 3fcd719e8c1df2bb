// The backward pass: rows in chunks over the threads. A chunk computes its dq and its share of dk and dv; the shares of a
// kv head are added in the order of the chunks, so that nothing depends on which thread was faster.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/cpu/backward_kernel.h"
#include "attention/cpu/host.h"
#include "base/choose_kernels.h"
#include "base/scratch_buffer.h"
#include "basin/attention/cpu.h"
#include "basin/base/error.h"

namespace basin::attention::cpu {
namespace {

constexpr std::int64_t kSinkQueries =
    128;  // queries whose shares of d_sink are summed first; changing it changes results

const BackwardKernel& kernel() {
  static const BackwardKernel chosen = choose_kernels([](auto target) { return backward_kernel(target); });
  return chosen;
}

using Buffer = ScratchBuffer<float>;

struct Call {
  const Backward& problem;
  std::int64_t group, h_q, h_kv, d_qk, d_v, total_q;
  Storage storage;

  explicit Call(const Backward& p)
      : problem(p),
        group(p.q.shape[1] / p.k.shape[p.k.rank == 4 ? 2 : 1]),
        h_q(p.q.shape[1]),
        h_kv(h_q / group),
        d_qk(p.q.shape[2]),
        d_v(p.dout.shape[2]),
        total_q(p.q.shape[0]),
        storage(cpu::storage(p.q.dtype)) {}

  const Sequence& sequence(std::int64_t s) const { return problem.sequences[static_cast<std::size_t>(s)]; }
};

float element(const ConstView& view, std::int64_t i) {
  switch (view.dtype) {
    case DType::f16:
      return to_float(static_cast<const f16*>(view.data)[i]);
    case DType::bf16:
      return to_float(static_cast<const bf16*>(view.data)[i]);
    default:
      return static_cast<const float*>(view.data)[i];
  }
}

// Of every row: lse_with_sink in base 2, and D.
struct RowSums {
  std::vector<float> lse2, big_d;  // [h_q, total_q]
};

// `out` and `lse` are those of the forward pass. Writes d_sink_logit, too.
RowSums sum_rows(const Call& call, const ConstView& out, const float* lse, ThreadPool& pool) {
  const Backward& p = call.problem;
  RowSums sums;
  sums.lse2.resize(static_cast<std::size_t>(call.h_q * call.total_q));
  sums.big_d.resize(sums.lse2.size());
  struct Part {
    std::int64_t sequence, begin, end;  // queries
  };
  std::vector<Part> parts;
  for (std::size_t s = 0; s < p.sequences.size(); ++s) {
    const std::int64_t queries = p.sequences[s].q_tokens;
    for (std::int64_t begin = 0; begin < queries; begin += kSinkQueries)
      parts.push_back({static_cast<std::int64_t>(s), begin, std::min(begin + kSinkQueries, queries)});
  }
  std::vector<double> dsink(parts.size() * static_cast<std::size_t>(call.h_q), 0.0);  // [parts, h_q]

  pool.parallel_for(static_cast<std::int64_t>(parts.size()), [&](std::int64_t n, int) {
    const Part& part = parts[static_cast<std::size_t>(n)];
    const Sequence& sequence = call.sequence(part.sequence);
    for (std::int64_t i = part.begin; i < part.end; ++i) {
      const std::int64_t token = sequence.q_begin + i;
      const Visible seen = visible_to(p.spec.mask, sequence, i);
      const bool sees_keys = seen.a_end > 0 || seen.b_end > seen.b_begin;
      for (std::int64_t h = 0; h < call.h_q; ++h) {
        const auto at = static_cast<std::size_t>(h * call.total_q + token);
        double d = 0;
        if (sees_keys) {
          const std::int64_t a = token * out.stride[0] + h * out.stride[1];
          const std::int64_t b = token * p.dout.stride[0] + h * p.dout.stride[1];
          for (std::int64_t c = 0; c < call.d_v; ++c)
            d += static_cast<double>(element(out, a + c)) * static_cast<double>(element(p.dout, b + c));
        }
        if (p.dlse_with_sink != nullptr) d -= static_cast<double>(p.dlse_with_sink[at]);
        const auto row_lse = static_cast<double>(lse[at]);
        sums.big_d[at] = static_cast<float>(d);
        sums.lse2[at] = std::isinf(row_lse) && row_lse < 0 ? 0.0f : static_cast<float>(row_lse * kLog2E);
        if (p.sink_logit == nullptr) continue;
        const auto sink = static_cast<double>(p.sink_logit[h]);
        if (std::isinf(sink) && sink < 0) continue;
        const double weight = std::isinf(sink) ? 1.0 : std::exp(sink - row_lse);
        dsink[static_cast<std::size_t>(n * call.h_q + h)] -= weight * d;
      }
    }
  });
  for (std::int64_t h = 0; p.dsink_logit != nullptr && h < call.h_q; ++h) {
    double sum = 0;
    for (std::size_t n = 0; n < parts.size(); ++n)
      sum += dsink[n * static_cast<std::size_t>(call.h_q) + static_cast<std::size_t>(h)];
    p.dsink_logit[h] = static_cast<float>(sum);
  }
  return sums;
}

// The sums of dk and dv of one kv head of one sequence, and whose turn it is to add.
struct KeySums {
  std::int64_t sequence = 0, kv_head = 0;
  std::int64_t chunks = 0;
  float* dk = nullptr;  // [kv_tokens, d_qk]
  float* dv = nullptr;  // [kv_tokens, d_v]
  std::atomic<std::int64_t> turn = 0;
};

struct Item {
  KeySums* sums;
  std::int64_t chunk;
  std::int64_t row_begin;
  int rows;
  KeyRange sinks, recent;  // whole tiles that some row sees a key of
};

// Waits until all chunks before this one have been added, and in any case lets the next one go on.
class Turn {
 public:
  Turn(KeySums& sums, std::int64_t chunk) : sums_(sums), chunk_(chunk) {}
  ~Turn() {
    wait();
    sums_.turn.store(chunk_ + 1, std::memory_order_release);
    sums_.turn.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  void wait() const {
    for (;;) {
      const std::int64_t now = sums_.turn.load(std::memory_order_acquire);
      if (now == chunk_) return;
      sums_.turn.wait(now, std::memory_order_acquire);
    }
  }

 private:
  KeySums& sums_;
  std::int64_t chunk_;
};

void find_keys(const Call& call, Item& item) {
  const Sequence& sequence = call.sequence(item.sums->sequence);
  std::int64_t a_end = 0, b_begin = sequence.kv_tokens, b_end = 0;
  for (std::int64_t i = item.row_begin / call.group; i * call.group < item.row_begin + item.rows; ++i) {
    const Visible v = visible_to(call.problem.spec.mask, sequence, i);
    a_end = std::max(a_end, v.a_end);
    if (v.b_end <= v.b_begin) continue;
    b_begin = std::min(b_begin, v.b_begin);
    b_end = std::max(b_end, v.b_end);
  }
  const auto up = [](std::int64_t j) { return ceil_div(j, kTileKeys) * kTileKeys; };
  item.sinks = {0, up(a_end)};
  item.recent = {std::max(b_begin / kTileKeys * kTileKeys, item.sinks.end), up(b_end)};
  if (item.recent.size() == 0) item.recent = {item.sinks.end, item.sinks.end};
}

// Per-thread memory.
struct Workspace {
  Buffer scratch, q, q_rows, dout, dout_rows, dq, dk, dv;
};

Workspace& workspace() {
  thread_local Workspace memory;
  return memory;
}

// The products of a chunk. Its shares of dk and dv: the keys of `sinks`, then those of `recent`.
struct Shares {
  const float* dk = nullptr;
  const float* dv = nullptr;
};

Shares multiply(const Call& call, const RowSums& row_sums, const Item& item, Workspace& memory) {
  const Backward& p = call.problem;
  const Sequence& sequence = call.sequence(item.sums->sequence);
  const auto rows = static_cast<std::size_t>(item.rows);
  std::array<Visible, kChunkRows> visible;
  std::array<float, kChunkRows> lse2, big_d;
  std::array<const std::byte*, kChunkRows> q_row, dout_row;
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int64_t row = item.row_begin + static_cast<std::int64_t>(r);
    const std::int64_t token = sequence.q_begin + row / call.group;
    const std::int64_t head = item.sums->kv_head * call.group + row % call.group;
    visible[r] = visible_to(p.spec.mask, sequence, row / call.group);
    lse2[r] = row_sums.lse2[static_cast<std::size_t>(head * call.total_q + token)];
    big_d[r] = row_sums.big_d[static_cast<std::size_t>(head * call.total_q + token)];
    const auto at = [&](const ConstView& view) {
      return bytes(view) + (token * view.stride[0] + head * view.stride[1]) * block_bytes(view.dtype);
    };
    q_row[r] = at(p.q);
    dout_row[r] = at(p.dout);
  }

  BackwardBlock block{};
  block.scores.storage = call.storage;
  block.scores.d_qk = static_cast<int>(call.d_qk);
  block.scores.d_v = static_cast<int>(call.d_v);
  block.scores.heads = 1;
  block.scores.rows = item.rows;
  block.scores.visible = visible.data();
  block.scores.k = key_rows(p.k, sequence, item.sums->kv_head);
  block.scores.v = key_rows(p.v, sequence, item.sums->kv_head);
  set_arithmetic(p.spec, block.scores);
  block.scale = static_cast<float>(p.spec.scale);
  block.lse2 = lse2.data();
  block.big_d = big_d.data();
  const auto pack = [&](const auto& row, std::int64_t d, Buffer& packed, Buffer& floats) {
    float* as_floats = floats.at_least(rows * static_cast<std::size_t>(d));
    float* as_packed =
        call.storage == Storage::bf16 ? packed.at_least(rows * static_cast<std::size_t>(d)) : as_floats;
    kernel().pack_rows(call.storage, static_cast<int>(d), item.rows, row.data(), as_packed, as_floats);
    return std::pair<const float*, const float*>(as_packed, as_floats);
  };
  std::tie(block.scores.q, block.q_rows) = pack(q_row, call.d_qk, memory.q, memory.q_rows);
  std::tie(block.dout, block.dout_rows) = pack(dout_row, call.d_v, memory.dout, memory.dout_rows);

  const auto zeros = [](Buffer& buffer, std::int64_t count) {
    float* data = buffer.at_least(static_cast<std::size_t>(count));
    std::fill_n(data, count, 0.0f);
    return data;
  };
  const std::int64_t keys = item.sinks.size() + item.recent.size();
  block.dq = zeros(memory.dq, item.rows * call.d_qk);
  block.dk = zeros(memory.dk, keys * call.d_qk);
  block.dv = zeros(memory.dv, keys * call.d_v);
  const Shares shares{block.dk, block.dv};
  float* scratch = memory.scratch.at_least(kernel().scratch_bytes / sizeof(float));
  kernel().run(block, item.sinks.begin, item.sinks.end, scratch);
  block.dk += item.sinks.size() * call.d_qk;
  block.dv += item.sinks.size() * call.d_v;
  kernel().run(block, item.recent.begin, item.recent.end, scratch);

  for (std::int64_t r = 0; r < item.rows; ++r) {
    const std::int64_t row = item.row_begin + r;
    const std::int64_t token = sequence.q_begin + row / call.group;
    const std::int64_t head = item.sums->kv_head * call.group + row % call.group;
    const float* from = block.dq + r * call.d_qk;
    store_elements(p.dq, token * p.dq.stride[0] + head * p.dq.stride[1], call.d_qk,
                   [from](std::int64_t d) { return from[d]; });
  }
  return shares;
}

void add_keys(const Call& call, const Item& item, const Shares& shares, std::int64_t kv_tokens) {
  std::int64_t key = 0;  // of the shares
  for (const KeyRange& range : {item.sinks, item.recent}) {
    const std::int64_t count = std::max<std::int64_t>(std::min(range.end, kv_tokens) - range.begin, 0);
    const auto add = [&](const float* from, float* to, std::int64_t d) {
      const float* share = from + key * d;
      float* sum = to + range.begin * d;
      for (std::int64_t i = 0; i < count * d; ++i) sum[i] += share[i];
    };
    add(shares.dk, item.sums->dk, call.d_qk);
    add(shares.dv, item.sums->dv, call.d_v);
    key += range.size();
  }
}

void store_keys(const Call& call, const KeySums& sums) {
  const Sequence& sequence = call.sequence(sums.sequence);
  const auto store = [&](const View& view, const float* from, std::int64_t d) {
    for (std::int64_t j = 0; j < sequence.kv_tokens; ++j) {
      std::int64_t offset = 0;
      if (view.rank == 4) {
        const std::int64_t page = sequence.pages[j / view.shape[1]];
        if (page < 0) continue;  // nobody sees its keys, and it has no place
        offset = page * view.stride[0] + j % view.shape[1] * view.stride[1] + sums.kv_head * view.stride[2];
      } else {
        offset = (sequence.kv_begin + j) * view.stride[0] + sums.kv_head * view.stride[1];
      }
      const float* row = from + j * d;
      store_elements(view, offset, d, [row](std::int64_t c) { return row[c]; });
    }
  };
  store(call.problem.dk, sums.dk, call.d_qk);
  store(call.problem.dv, sums.dv, call.d_v);
}

void run_item(const Call& call, const RowSums& row_sums, const Item& item) {
  const std::int64_t kv_tokens = call.sequence(item.sums->sequence).kv_tokens;
  const Turn turn(*item.sums, item.chunk);
  Shares shares;
  if (item.rows > 0) shares = multiply(call, row_sums, item, workspace());
  turn.wait();
  if (item.rows > 0) add_keys(call, item, shares, kv_tokens);
  if (item.chunk + 1 == item.sums->chunks) store_keys(call, *item.sums);
}

void run_items(const Call& call, const RowSums& row_sums, ThreadPool& pool) {
  const Backward& p = call.problem;
  std::int64_t floats = 0;
  for (const Sequence& s : p.sequences) floats += s.kv_tokens * call.h_kv * (call.d_qk + call.d_v);
  std::vector<float> memory(static_cast<std::size_t>(floats), 0.0f);
  std::vector<KeySums> sums(p.sequences.size() * static_cast<std::size_t>(call.h_kv));
  std::vector<Item> items;
  float* next = memory.data();
  for (std::size_t n = 0; n < sums.size(); ++n) {
    KeySums& s = sums[n];
    s.sequence = static_cast<std::int64_t>(n) / call.h_kv;
    s.kv_head = static_cast<std::int64_t>(n) % call.h_kv;
    const Sequence& sequence = call.sequence(s.sequence);
    s.dk = next;
    s.dv = next + sequence.kv_tokens * call.d_qk;
    next += sequence.kv_tokens * (call.d_qk + call.d_v);
    const std::int64_t rows = sequence.q_tokens * call.group;
    s.chunks = std::max<std::int64_t>(ceil_div(rows, kChunkRows),
                                      1);  // keys without queries have gradients, too: zero
    for (std::int64_t chunk = 0; chunk < s.chunks; ++chunk) {
      Item item{&s, chunk, chunk * kChunkRows, 0, {}, {}};
      item.rows = static_cast<int>(std::min<std::int64_t>(kChunkRows, rows - item.row_begin));
      find_keys(call, item);
      items.push_back(item);
    }
  }
  // Indices are handed out in ascending order, so whoever waits for its turn waits for threads that are at work.
  pool.parallel_for(static_cast<std::int64_t>(items.size()), [&](std::int64_t i, int) {
    run_item(call, row_sums, items[static_cast<std::size_t>(i)]);
  });
}

}  // namespace

std::string supported(const Backward& p) {
  for (const ConstView& view : {p.q, p.k, p.v, p.dout}) {
    if (!storable(view.dtype) || view.dtype != p.q.dtype) {
      return fmt::format(
          "q, k, v and dout are {}, {}, {} and {}; the CPU path has f32, f16 or bf16, the same for all four",
          name(p.q.dtype), name(p.k.dtype), name(p.v.dtype), name(p.dout.dtype));
    }
  }
  std::string reason = check_head("d_qk", p.q.shape[2]);
  if (reason.empty()) reason = check_head("d_v", p.dout.shape[2]);
  const auto check_all = [&](std::string_view what, const ConstView& view, bool gradient) {
    if (!reason.empty()) return;
    reason = check_view(what, view);
    if (reason.empty() && gradient && view.dtype != DType::f32 && view.dtype != p.q.dtype)
      reason = fmt::format("{} is {}; the CPU path writes f32 or the dtype of q, {}", what, name(view.dtype),
                           name(p.q.dtype));
  };
  check_all("q", p.q, false);
  check_all("k", p.k, false);
  check_all("v", p.v, false);
  check_all("dout", p.dout, false);
  if (p.out) check_all("out", p.out, true);
  check_all("dq", p.dq, true);
  check_all("dk", p.dk, true);
  check_all("dv", p.dv, true);
  return reason;
}

void backward(const Backward& problem, ThreadPool& pool) {
  if (const std::string reason = supported(problem); !reason.empty())
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
  const Call call(problem);
  ConstView out = problem.out;
  const float* lse = problem.lse_with_sink;
  std::vector<std::byte> out_memory;
  std::vector<float> lse_memory;
  if (!out) {  // as the forward pass would have left them
    out_memory.resize(
        static_cast<std::size_t>(call.total_q * call.h_q * call.d_v * block_bytes(problem.q.dtype)));
    lse_memory.resize(static_cast<std::size_t>(call.h_q * call.total_q));
    Forward again;
    again.spec = problem.spec;
    again.sequences = problem.sequences;
    again.q = problem.q;
    again.k = problem.k;
    again.v = problem.v;
    again.sink_logit = problem.sink_logit;
    again.out = contiguous<void*>(out_memory.data(), problem.q.dtype, {call.total_q, call.h_q, call.d_v});
    again.lse_with_sink = lse_memory.data();
    forward(again, pool);
    out = again.out;
    lse = lse_memory.data();
  }
  const RowSums row_sums = sum_rows(call, out, lse, pool);
  run_items(call, row_sums, pool);
}

}  // namespace basin::attention::cpu
