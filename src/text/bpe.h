// Byte pair encoding: merges by rank. Byte-level (every piece is spelled in the byte alphabet) or over characters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/vocabulary.h"

namespace basin::text {

struct BpeOptions {
  bool byte_level = true;                 // else pieces start as characters
  std::optional<ByteTokens> byte_tokens;  // over characters: what those without a token become
  bool ignore_merges = false;             // a piece that is a token is taken whole, whatever the merges say
  std::optional<std::int32_t> unknown;    // for what has no token otherwise; it is dropped when absent
  bool fuse_unknown = false;              // one unknown token for a run
};

class Bpe : public PieceModel {
 public:
  using Merges = std::vector<std::pair<std::string, std::string>>;

  /// `merges` in order of rank; those of or to special tokens are left out, since plain text must never become one.
  /// Throws Error(corrupt) for merges that are repeated or whose parts or result are not in the vocabulary.
  Bpe(const PlainVocabulary& vocabulary, const Merges& merges, BpeOptions options);

  void encode(std::string_view piece, std::vector<std::int32_t>& ids) const override;

 private:
  struct Merge {
    std::int32_t rank;
    std::int32_t result;
  };
  struct PairHash {
    std::size_t operator()(std::uint64_t key) const {
      key *= 0x9e3779b97f4a7c15u;  // std::hash is the identity, which collides on packed pairs
      return static_cast<std::size_t>(key ^ (key >> 29));
    }
  };
  void start_bytes(std::string_view piece, std::vector<std::int32_t>& symbols) const;
  void start_characters(std::string_view piece, std::vector<std::int32_t>& symbols) const;

  BpeOptions options_;
  ByteTokens byte_ids_{};                                     // byte-level only
  std::unordered_map<char32_t, std::int32_t> character_ids_;  // over characters only
  std::unordered_map<std::uint64_t, Merge, PairHash> merges_;
  Vocabulary whole_;  // piece -> id, for ignore_merges only
};

}  // namespace basin::text
