#include "text/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <queue>

#include "basin/base/error.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) |
         static_cast<std::uint32_t>(right);
}

std::int32_t id_in(const Vocabulary& vocabulary, const std::string& spelling, std::size_t rank) {
  const auto found = vocabulary.find(spelling);
  if (found == vocabulary.end()) {
    throw Error(
        ErrorCode::corrupt,
        fmt::format("merge {}: '{}' is not in the vocabulary, or is a special token", rank, spelling));
  }
  return found->second;
}

}  // namespace

struct Bpe::Candidate {
  std::int32_t rank, position, left, right, result;
  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : position > other.position;
  }
};

Bpe::Bpe(const Vocabulary& vocabulary, const std::vector<std::pair<std::string, std::string>>& merges,
         BpeOptions options)
    : options_(options) {
  for (std::size_t b = 0; b < 256; ++b) {
    const auto found = vocabulary.find(spelling_of_byte(static_cast<std::uint8_t>(b)));
    byte_ids_[b] = found == vocabulary.end() ? -1 : found->second;
  }
  merges_.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const std::int32_t l = id_in(vocabulary, left, rank), r = id_in(vocabulary, right, rank);
    const Merge merge{static_cast<std::int32_t>(rank), id_in(vocabulary, left + right, rank)};
    if (!merges_.emplace(pair_key(l, r), merge).second) {
      throw Error(ErrorCode::corrupt, fmt::format("merge {}: '{} {}' appears twice", rank, left, right));
    }
  }
  if (!options_.ignore_merges) return;
  for (const auto& [spelling, id] : vocabulary) {
    if (auto bytes = bytes_of_spelling(spelling)) whole_.emplace(std::move(*bytes), id);
  }
}

bool Bpe::has_every_byte() const {
  return std::none_of(byte_ids_.begin(), byte_ids_.end(), [](std::int32_t id) { return id < 0; });
}

const Bpe::Merge* Bpe::find_merge(std::int32_t left, std::int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::start_symbols(std::string_view piece, std::vector<std::int32_t>& symbols) const {
  symbols.reserve(piece.size());
  bool after_unknown = false;
  for (const char c : piece) {
    const std::int32_t id = byte_ids_[static_cast<std::uint8_t>(c)];
    if (id >= 0) {
      symbols.push_back(id);
    } else if (options_.unknown && !(options_.fuse_unknown && after_unknown)) {
      symbols.push_back(*options_.unknown);
    }
    after_unknown = id < 0;
  }
}

void Bpe::encode(std::string_view piece, std::vector<std::int32_t>& ids) const {
  if (piece.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Error(ErrorCode::invalid_argument, "a single word of 2 GiB or more cannot be tokenised");
  }
  if (options_.ignore_merges) {
    if (const auto found = whole_.find(std::string(piece)); found != whole_.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  std::vector<std::int32_t> symbols;
  start_symbols(piece, symbols);
  const auto count = static_cast<std::int32_t>(symbols.size());
  const auto at = [](std::int32_t i) { return static_cast<std::size_t>(i); };

  // A doubly linked list of live symbols (a dead one is -1) and a heap of pairs, stale ones skipped when popped.
  std::vector<std::int32_t> next(symbols.size()), previous(symbols.size());
  std::vector<Candidate> initial;
  initial.reserve(symbols.size());
  const auto candidate = [&](std::int32_t i, std::int32_t j, auto&& add) {
    const std::int32_t left = symbols[at(i)], right = symbols[at(j)];
    if (const Merge* merge = find_merge(left, right))
      add(Candidate{merge->rank, i, left, right, merge->result});
  };
  for (std::int32_t i = 0; i < count; ++i) {
    next[at(i)] = i + 1;
    previous[at(i)] = i - 1;
    if (i > 0) candidate(i - 1, i, [&](Candidate c) { initial.push_back(c); });
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap(std::greater<>{},
                                                                              std::move(initial));
  const auto push = [&](Candidate c) { heap.push(c); };
  while (!heap.empty()) {
    const Candidate best = heap.top();
    heap.pop();
    const std::int32_t i = best.position;
    if (symbols[at(i)] != best.left) continue;
    const std::int32_t j = next[at(i)];
    if (j >= count || symbols[at(j)] != best.right) continue;
    symbols[at(i)] = best.result;
    symbols[at(j)] = -1;
    next[at(i)] = next[at(j)];
    if (next[at(i)] < count) {
      previous[at(next[at(i)])] = i;
      candidate(i, next[at(i)], push);
    }
    if (previous[at(i)] >= 0) candidate(previous[at(i)], i, push);
  }
  for (const std::int32_t id : symbols) {
    if (id >= 0) ids.push_back(id);
  }
}

}  // namespace basin::text
