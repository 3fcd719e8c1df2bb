#include "basin/attention/sparse.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "attention/checks.h"
#include "basin/attention/cpu.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"

namespace basin::attention {
namespace {

// Positions of one row, each seen once.
class RowCheck {
 public:
  void check(std::span<const std::int32_t> row, std::int64_t number, std::int64_t keys) {
    seen_.assign(static_cast<std::size_t>(keys), false);
    for (const std::int32_t key : row) {
      if (key == -1) continue;
      if (key < 0 || key >= keys)
        refuse(fmt::format("selection of query row {}: key {} of {}", number, key, keys));
      if (seen_[static_cast<std::size_t>(key)])
        refuse(fmt::format("selection of query row {}: key {} twice", number, key));
      seen_[static_cast<std::size_t>(key)] = true;
    }
  }

 private:
  std::vector<bool> seen_;
};

// `automatic` resolved: the CPU where it can, else the reference. Throws when the CPU was asked for and cannot.
Backend resolve(Backend backend, const std::string& reason) {
  if (backend == Backend::automatic) return reason.empty() ? Backend::cpu : Backend::reference;
  if (backend == Backend::cpu && !reason.empty())
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
  return backend;
}

}  // namespace

void check(const Forward& problem, const Selection& selection) {
  check(problem);
  if (selection.indices == nullptr) return;
  if (selection.topk < 0) refuse(fmt::format("topk is {}; it must be 0 or more", selection.topk));
  RowCheck rows;
  for (const Sequence& sequence : problem.sequences) {
    for (std::int64_t row = sequence.q_begin; row < sequence.q_begin + sequence.q_tokens; ++row) {
      const std::int64_t count = selection.lengths == nullptr ? selection.topk : selection.lengths[row];
      if (count < 0 || count > selection.topk)
        refuse(fmt::format("selection of query row {}: {} of {} entries count", row, count, selection.topk));
      const std::int32_t* begin = selection.indices + row * selection.topk;
      rows.check({begin, static_cast<std::size_t>(count)}, row, sequence.kv_tokens);
    }
  }
}

void check(const Indexer& indexer) {
  Forward problem;  // the same shapes, with its keys as values and its queries as output
  problem.spec = {indexer.mask, 1.0, 0.0};
  problem.sequences = indexer.sequences;
  problem.q = indexer.q;
  problem.q_sink = indexer.q_sink;
  problem.k = problem.v = indexer.k;
  problem.out = contiguous(static_cast<void*>(indexer.indices), DType::f32,
                           {indexer.q.shape[0], indexer.q.shape[1], indexer.q.shape[2]});
  check(problem);
  const std::int64_t heads = indexer.k.shape[static_cast<std::size_t>(indexer.k.rank - 2)];
  if (heads != 1) refuse(fmt::format("an indexer has one key head, not {}", heads));
  if (indexer.topk < 1) refuse(fmt::format("topk is {}; it must be 1 or more", indexer.topk));
  if (indexer.forced_first < 0 || indexer.forced_last < 0 ||
      indexer.forced_first > indexer.topk - std::min(indexer.topk, indexer.forced_last) ||
      indexer.forced_last > indexer.topk) {
    refuse(fmt::format("{} first and {} last keys are forced into a selection of {}", indexer.forced_first,
                       indexer.forced_last, indexer.topk));
  }
  if (indexer.q.shape[0] > 0 && (indexer.weights == nullptr || indexer.indices == nullptr))
    refuse("an indexer needs weights, and indices to write");
}

Ran forward(const Forward& problem, const Selection& selection, Backend backend, ThreadPool& pool) {
  check(problem, selection);
  if (resolve(backend, cpu::supported(problem, selection)) == Backend::reference) {
    reference::forward(problem, selection);
    return {"reference", "double"};
  }
  cpu::forward(problem, selection, pool);
  return {"cpu", cpu::target_name()};
}

Ran select(const Indexer& indexer, Backend backend, ThreadPool& pool) {
  check(indexer);
  if (resolve(backend, cpu::supported(indexer)) == Backend::reference) {
    reference::select(indexer);
    return {"reference", "double"};
  }
  cpu::select(indexer, pool);
  return {"cpu", cpu::target_name()};
}

}  // namespace basin::attention
