// The loop that every BPE shares: neighbours are merged, the best pair first, leftmost first among equals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace basin::text {

/// Merges `symbols` until no pair merges any more. `find(left, right)` gives an optional with members `rank` (lower is
/// better) and `result` (the symbol of both). O(n log n) calls and steps, for less than 2^31 symbols.
template <typename Symbol, typename Find>
void merge_pairs(std::vector<Symbol>& symbols, const Find& find) {
  using Merge = typename decltype(find(symbols[0], symbols[0]))::value_type;
  struct Candidate {
    Merge merge;
    std::int32_t position;
    Symbol left, right;
    bool operator>(const Candidate& other) const {
      return merge.rank != other.merge.rank ? merge.rank > other.merge.rank : position > other.position;
    }
  };
  const auto count = static_cast<std::int32_t>(symbols.size());
  const auto at = [](std::int32_t i) { return static_cast<std::size_t>(i); };

  // A doubly linked list of live symbols and a heap of pairs, stale ones skipped when popped.
  constexpr std::int32_t kDead = -1;
  std::vector<std::int32_t> next(symbols.size()), previous(symbols.size());
  std::vector<Candidate> initial;
  initial.reserve(symbols.size());
  const auto candidate = [&](std::int32_t i, std::int32_t j, const auto& add) {
    if (const auto merge = find(symbols[at(i)], symbols[at(j)]))
      add(Candidate{*merge, i, symbols[at(i)], symbols[at(j)]});
  };
  for (std::int32_t i = 0; i < count; ++i) {
    next[at(i)] = i + 1;
    previous[at(i)] = i - 1;
    if (i > 0) candidate(i - 1, i, [&](const Candidate& c) { initial.push_back(c); });
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap(std::greater<>{},
                                                                              std::move(initial));
  const auto push = [&](const Candidate& c) { heap.push(c); };
  while (!heap.empty()) {
    const Candidate best = heap.top();
    heap.pop();
    const std::int32_t i = best.position, j = next[at(i)];
    if (j == kDead || j >= count) continue;
    if (symbols[at(i)] != best.left || symbols[at(j)] != best.right) continue;
    symbols[at(i)] = best.merge.result;
    next[at(i)] = next[at(j)];
    next[at(j)] = kDead;
    if (next[at(i)] < count) {
      previous[at(next[at(i)])] = i;
      candidate(i, next[at(i)], push);
    }
    if (previous[at(i)] >= 0) candidate(previous[at(i)], i, push);
  }
  std::size_t live = 0;
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    if (next[i] != kDead) symbols[live++] = symbols[i];
  }
  symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(live), symbols.end());
}

}  // namespace basin::text
