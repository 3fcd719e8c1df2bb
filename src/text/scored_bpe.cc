#include "text/scored_bpe.h"

#include <algorithm>

#include "text/merge_pairs.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

struct Symbol {
  std::uint32_t begin, bytes;
  bool operator==(const Symbol&) const = default;
};

struct Merge {
  float rank;
  Symbol result;
};

}  // namespace

ScoredBpe::ScoredBpe(const PlainVocabulary& vocabulary, ScoredBpeOptions options)
    : vocabulary_(vocabulary), options_(std::move(options)) {
  for (const auto& [spelling, id] : vocabulary.ids) {
    if (!vocabulary.excludes(id)) longest_ = std::max(longest_, spelling.size());
  }
}

void ScoredBpe::encode(std::string_view piece, std::vector<std::int32_t>& ids) const {
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (std::uint32_t i = 0; i < piece.size();) {
    const auto bytes = static_cast<std::uint32_t>(first_character(piece.substr(i)).bytes);
    symbols.push_back({i, bytes});
    i += bytes;
  }
  merge_pairs(symbols, [&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
    const Symbol both{left.begin, left.bytes + right.bytes};
    if (both.bytes > longest_) return {};
    const std::int32_t id = vocabulary_.find(piece.substr(both.begin, both.bytes));
    if (id < 0) return {};
    return Merge{-options_.scores[static_cast<std::size_t>(id)], both};
  });
  bool after_unknown = false;
  for (const Symbol& symbol : symbols) {
    const std::string_view text = piece.substr(symbol.begin, symbol.bytes);
    const std::int32_t id = vocabulary_.find(text);
    const bool known = id >= 0 || append_bytes(text, options_.byte_tokens, ids);
    if (id >= 0) ids.push_back(id);
    if (!known && options_.unknown && !after_unknown) ids.push_back(*options_.unknown);
    after_unknown = !known;
  }
}

}  // namespace basin::text
