// The indexer: scores of a few queries at a time against all their keys, and what each of them selects.
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

constexpr std::int64_t kQueries = 16;                         // that share a packed tile of keys
constexpr std::int64_t kPartKeys = 4096;                      // of one task
constexpr std::int64_t kScoreFloats = std::int64_t{8} << 20;  // scores in memory at a time, about

const SparseKernel& kernel() {
  static const SparseKernel chosen = choose_kernels([](auto target) { return sparse_kernel(target); });
  return chosen;
}
const Kernel& dense_kernel() {
  static const Kernel chosen = choose_kernels([](auto target) { return cpu::kernel(target); });
  return chosen;
}

// Queries [first, first + count) of a sequence, and their scores [count, row_floats] by position of the key.
struct QueryBlock {
  const Sequence* sequence;
  std::int64_t first, count, row_floats;
  float* scores;
};

struct Workspace {
  ScratchBuffer<float> queries, kernel_scratch;
};

Workspace& workspace() {
  thread_local Workspace memory;
  return memory;
}

// Keys of the tile at `begin` that some query of the block sees: others may lie on no page.
std::uint64_t seen_by_any(const Mask& mask, const QueryBlock& block, std::int64_t begin) {
  std::uint64_t seen = 0;
  const auto add = [&](std::int64_t from, std::int64_t to) {
    from = std::max(from - begin, std::int64_t{0});
    to = std::min(to - begin, std::int64_t{kTileKeys});
    if (from >= to) return;
    seen |= ~std::uint64_t{0} << static_cast<unsigned>(from) &
            ~std::uint64_t{0} >> static_cast<unsigned>(kTileKeys - to);
  };
  for (std::int64_t i = block.first; i < block.first + block.count; ++i) {
    const Visible v = visible_to(mask, *block.sequence, i);
    add(0, v.a_end);
    add(v.b_begin, v.b_end);
  }
  return seen;
}

// Scores of the keys in [begin, end) for all queries of the block.
void score_part(const Indexer& p, const QueryBlock& block, std::int64_t begin, std::int64_t end) {
  Workspace& memory = workspace();
  IndexTile tile{};
  tile.storage = storage(p.q.dtype);
  tile.d = static_cast<int>(p.q.shape[2]);
  tile.heads = static_cast<int>(p.q.shape[1]);
  tile.queries = static_cast<int>(block.count);
  tile.k = key_rows(p.k, *block.sequence, 0);
  tile.row_floats = block.row_floats;
  const std::int64_t token = block.sequence->q_begin + block.first;
  tile.weights = p.weights + token * p.q.shape[1];
  float* scratch = memory.kernel_scratch.at_least(kernel().index_scratch_bytes / sizeof(float));
  const auto pack = [&](const ConstView& view) {
    std::vector<const std::byte*> row;
    for (std::int64_t i = 0; i < block.count; ++i) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        row.push_back(bytes(view) +
                      ((token + i) * view.stride[0] + h * view.stride[1]) * block_bytes(view.dtype));
      }
    }
    float* packed = memory.queries.at_least(row.size() * static_cast<std::size_t>(tile.d));
    dense_kernel().pack_queries(tile.storage, tile.d, static_cast<int>(row.size()), row.data(), packed);
    return packed;
  };
  const auto score_tiles = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t key = from; key < to; key += kTileKeys) {
      tile.begin = key;
      tile.wanted = seen_by_any(p.mask, block, key);
      if (tile.wanted == 0) continue;
      tile.scores = block.scores + key;
      kernel().index(tile, scratch);
    }
  };
  const std::int64_t sinks = p.q_sink ? std::min(p.mask.sink_tokens, end) : 0;
  // The tile that holds both kinds of keys is scored twice: the sinks' part of the second time is put back.
  if (sinks > begin) {
    tile.q = pack(p.q_sink);
    score_tiles(begin, sinks);
  }
  if (sinks >= end) return;
  tile.q = pack(p.q);
  if (sinks <= begin) return score_tiles(begin, end);
  const std::int64_t shared = sinks / kTileKeys * kTileKeys, count = sinks - shared;
  std::array<std::array<float, kTileKeys>, kQueries> kept;
  for (std::int64_t i = 0; i < block.count; ++i)
    std::copy_n(block.scores + i * block.row_floats + shared, count,
                kept[static_cast<std::size_t>(i)].data());
  score_tiles(shared, end);
  for (std::int64_t i = 0; i < block.count; ++i)
    std::copy_n(kept[static_cast<std::size_t>(i)].data(), count,
                block.scores + i * block.row_floats + shared);
}

// Query `i` of the block, whose scores are there.
void select_row(const Indexer& p, const QueryBlock& block, std::int64_t i) {
  const Visible visible = visible_to(p.mask, *block.sequence, block.first + i);
  const std::int64_t sinks = visible.a_end;  // at most b_begin
  const std::int64_t recent = std::max<std::int64_t>(visible.b_end - visible.b_begin, 0);
  const std::int64_t count = sinks + recent;
  float* score = block.scores + i * block.row_floats;
  std::int32_t* out = p.indices + (block.sequence->q_begin + block.first + i) * p.topk;
  // Visible keys side by side; those behind the gap are `gap` further on.
  const std::int64_t gap = visible.b_begin - sinks;
  if (gap > 0) std::copy_n(score + visible.b_begin, recent, score + sinks);
  std::int64_t taken = 0;
  if (count <= p.topk) {
    for (; taken < count; ++taken) out[taken] = static_cast<std::int32_t>(taken);
  } else {
    for (; taken < p.forced_first; ++taken) out[taken] = static_cast<std::int32_t>(taken);
    const std::int64_t free = count - p.forced_first - p.forced_last;
    const std::int64_t found = select_topk({score + p.forced_first, static_cast<std::size_t>(free)},
                                           p.topk - p.forced_first - p.forced_last, out + taken);
    for (std::int64_t end = taken + found; taken < end; ++taken)
      out[taken] += static_cast<std::int32_t>(p.forced_first);
    for (std::int64_t key = count - p.forced_last; key < count; ++key)
      out[taken++] = static_cast<std::int32_t>(key);
  }
  for (std::int64_t n = 0; n < taken; ++n) {
    if (out[n] >= sinks) out[n] += static_cast<std::int32_t>(gap);
  }
  std::fill(out + taken, out + p.topk, -1);
}

std::int64_t visible_count(const Indexer& p, const Sequence& sequence, std::int64_t i) {
  return visible_keys(p.mask, query_position(sequence, i), sequence.kv_tokens).size();
}

}  // namespace

std::string supported(const Indexer& p) {
  for (const ConstView& view : {p.k, p.q_sink ? p.q_sink : p.q}) {
    if (!storable(p.q.dtype) || view.dtype != p.q.dtype) {
      return fmt::format(
          "q and k of an indexer are {} and {}; the CPU path has f32, f16 or bf16, the same for both",
          name(p.q.dtype), name(view.dtype));
    }
  }
  std::string reason = check_head("the indexer's head size", p.q.shape[2]);
  if (reason.empty()) reason = check_view("q", p.q);
  if (reason.empty()) reason = check_view("k", p.k);
  return reason;
}

void select(const Indexer& p, ThreadPool& pool) {
  if (const std::string reason = supported(p); !reason.empty())
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
  std::vector<QueryBlock> blocks;
  for (const Sequence& sequence : p.sequences) {
    const std::int64_t row_floats =
        ceil_div(std::max<std::int64_t>(sequence.kv_tokens, 1), kTileKeys) * kTileKeys;
    for (std::int64_t first = 0; first < sequence.q_tokens; first += kQueries)
      blocks.push_back(
          {&sequence, first, std::min(kQueries, sequence.q_tokens - first), row_floats, nullptr});
  }
  thread_local ScratchBuffer<float> memory;
  struct Part {
    const QueryBlock* block;
    std::int64_t begin;
  };
  std::vector<Part> parts;
  for (std::size_t done = 0; done < blocks.size();) {
    // As many blocks as there is memory for, at least one.
    std::int64_t floats = 0;
    std::size_t end = done;
    for (; end < blocks.size() && (end == done || floats < kScoreFloats); ++end)
      floats += blocks[end].count * blocks[end].row_floats;
    float* at = memory.at_least(static_cast<std::size_t>(floats));
    parts.clear();
    for (std::size_t b = done; b < end; ++b) {
      QueryBlock& block = blocks[b];
      block.scores = at;
      at += block.count * block.row_floats;
      // A block whose queries select all that they see needs no scores.
      bool scored = false;
      for (std::int64_t i = 0; i < block.count; ++i)
        scored = scored || visible_count(p, *block.sequence, block.first + i) > p.topk;
      for (std::int64_t key = 0; scored && key < block.sequence->kv_tokens; key += kPartKeys)
        parts.push_back({&block, key});
    }
    pool.parallel_for(static_cast<std::int64_t>(parts.size()), [&](std::int64_t i, int) {
      const Part& part = parts[static_cast<std::size_t>(i)];
      score_part(p, *part.block, part.begin,
                 std::min(part.begin + kPartKeys, part.block->sequence->kv_tokens));
    });
    pool.parallel_for(static_cast<std::int64_t>(end - done), [&](std::int64_t b, int) {
      const QueryBlock& block = blocks[done + static_cast<std::size_t>(b)];
      for (std::int64_t i = 0; i < block.count; ++i) select_row(p, block, i);
    });
    done = end;
  }
}

}  // namespace basin::attention::cpu
