#include <algorithm>
#include <cmath>

#include "attention/reference/rows.h"
#include "basin/attention/reference.h"
#include "basin/base/error.h"

namespace basin::attention::reference {
namespace {

double index_score(const Indexer& indexer, const Sequence& sequence, std::int64_t row, std::int64_t key) {
  const ConstView& q = indexer.q_sink && key < indexer.mask.sink_tokens ? indexer.q_sink : indexer.q;
  const std::int64_t k_at = key_at(indexer.k, sequence, key, 0);
  double score = 0;
  for (std::int64_t h = 0; h < q.shape[1]; ++h) {
    double dot = 0;
    for (std::int64_t d = 0; d < q.shape[2]; ++d)
      dot += load(q.data, q.dtype, at(q, row, h) + d) * load(indexer.k.data, indexer.k.dtype, k_at + d);
    // Written so that a NaN stays one.
    score += static_cast<double>(indexer.weights[row * q.shape[1] + h]) * (dot < 0 ? 0.0 : dot);
  }
  return score;
}

void select_row(const Indexer& indexer, const Sequence& sequence, std::int64_t i) {
  const std::int64_t row = sequence.q_begin + i;
  const std::vector<std::int64_t> keys = keys_of(indexer.mask, sequence, i);
  struct Candidate {
    std::int64_t key;
    bool forced;
    double score;
  };
  std::vector<Candidate> order;
  const auto count = static_cast<std::int64_t>(keys.size());
  for (std::int64_t n = 0; n < count; ++n) {
    const bool forced = n < indexer.forced_first || n >= count - indexer.forced_last;
    order.push_back({keys[static_cast<std::size_t>(n)], forced, 0.0});
    if (count <= indexer.topk || forced) continue;
    order.back().score = index_score(indexer, sequence, row, order.back().key);
    if (std::isnan(order.back().score))
      throw Error(ErrorCode::invalid_argument, "an index score is NaN; nobody can say where it stands");
  }
  std::stable_sort(order.begin(), order.end(), [](const Candidate& a, const Candidate& b) {
    if (a.forced != b.forced) return a.forced;
    return a.score > b.score;
  });
  order.resize(static_cast<std::size_t>(std::min(count, indexer.topk)));
  std::int32_t* out = indexer.indices + row * indexer.topk;
  std::fill(out, out + indexer.topk, -1);
  std::transform(order.begin(), order.end(), out,
                 [](const Candidate& c) { return static_cast<std::int32_t>(c.key); });
  std::sort(out, out + order.size());
}

}  // namespace

void select(const Indexer& indexer) {
  for (const Sequence& sequence : indexer.sequences) {
    for (std::int64_t i = 0; i < sequence.q_tokens; ++i) select_row(indexer, sequence, i);
  }
}

}  // namespace basin::attention::reference
