#include "text/bpe.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"
#include "text/merge_pairs.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) |
         static_cast<std::uint32_t>(right);
}

std::int32_t id_in(const Vocabulary& vocabulary, const std::string& spelling, std::size_t rank) {
  const auto found = vocabulary.find(spelling);
  if (found == vocabulary.end())
    throw Error(ErrorCode::corrupt, fmt::format("merge {}: '{}' is not in the vocabulary", rank, spelling));
  return found->second;
}

// The only character of `spelling`, if there is just one.
std::optional<char32_t> single_character(std::string_view spelling) {
  if (spelling.empty()) return {};
  const Utf8Step step = first_character(spelling);
  return step.kind == Utf8Step::complete && step.bytes == spelling.size() ? std::optional(step.code_point)
                                                                          : std::nullopt;
}

}  // namespace

Bpe::Bpe(const PlainVocabulary& vocabulary, const Merges& merges, BpeOptions options)
    : options_(std::move(options)) {
  for (std::size_t b = 0; b < 256; ++b) {
    byte_ids_[b] = vocabulary.find(spelling_of_byte(static_cast<std::uint8_t>(b)));
  }
  for (const auto& [spelling, id] : vocabulary.ids) {
    if (vocabulary.excludes(id)) continue;
    if (options_.ignore_merges) {
      if (!options_.byte_level) whole_.emplace(spelling, id);
      if (auto bytes = bytes_of_spelling(spelling); bytes && options_.byte_level)
        whole_.emplace(std::move(*bytes), id);
    }
    if (options_.byte_level) continue;
    if (const auto character = single_character(spelling)) character_ids_.emplace(*character, id);
  }
  merges_.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const std::int32_t l = id_in(vocabulary.ids, left, rank), r = id_in(vocabulary.ids, right, rank);
    const Merge merge{static_cast<std::int32_t>(rank), id_in(vocabulary.ids, left + right, rank)};
    if (vocabulary.excludes(l) || vocabulary.excludes(r) || vocabulary.excludes(merge.result)) continue;
    if (!merges_.emplace(pair_key(l, r), merge).second) {
      throw Error(ErrorCode::corrupt, fmt::format("merge {}: '{} {}' appears twice", rank, left, right));
    }
  }
}

void Bpe::start_bytes(std::string_view piece, std::vector<std::int32_t>& symbols) const {
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

void Bpe::start_characters(std::string_view piece, std::vector<std::int32_t>& symbols) const {
  bool after_unknown = false;
  while (!piece.empty()) {
    const Utf8Step step = first_character(piece);
    const std::string_view character = piece.substr(0, step.bytes);
    piece.remove_prefix(step.bytes);
    if (const auto found = character_ids_.find(step.code_point); found != character_ids_.end()) {
      symbols.push_back(found->second);
      after_unknown = false;
    } else if (options_.byte_tokens && append_bytes(character, *options_.byte_tokens, symbols)) {
      after_unknown = false;
    } else {
      if (options_.unknown && !(options_.fuse_unknown && after_unknown)) symbols.push_back(*options_.unknown);
      after_unknown = true;
    }
  }
}

void Bpe::encode(std::string_view piece, std::vector<std::int32_t>& ids) const {
  if (options_.ignore_merges) {
    if (const auto found = whole_.find(piece); found != whole_.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  std::vector<std::int32_t> symbols;
  symbols.reserve(piece.size());
  options_.byte_level ? start_bytes(piece, symbols) : start_characters(piece, symbols);
  merge_pairs(symbols, [this](std::int32_t left, std::int32_t right) -> std::optional<Merge> {
    const auto found = merges_.find(pair_key(left, right));
    return found == merges_.end() ? std::nullopt : std::optional(found->second);
  });
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

}  // namespace basin::text
