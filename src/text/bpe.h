// Byte pair encoding over bytes: merges by rank, lowest first, leftmost first among equals.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace basin::text {

using Vocabulary = std::unordered_map<std::string, std::int32_t>;  // spelling in the byte alphabet -> id

struct BpeOptions {
  bool ignore_merges = false;           // a piece that is a token is taken whole, whatever the merges say
  std::optional<std::int32_t> unknown;  // for bytes without a token; they are dropped when absent
  bool fuse_unknown = false;            // one unknown token for a run of such bytes
};

class Bpe {
 public:
  /// `merges` in order of rank. Throws Error(corrupt) for merges that are repeated or whose parts or result are
  /// not in the vocabulary.
  Bpe(const Vocabulary& vocabulary, const std::vector<std::pair<std::string, std::string>>& merges,
      BpeOptions options);

  /// Appends the ids of one piece. O(n log n) in its bytes.
  void encode(std::string_view piece, std::vector<std::int32_t>& ids) const;

  bool has_every_byte() const;

 private:
  struct Merge {
    std::int32_t rank;
    std::int32_t result;
  };
  struct Candidate;
  struct PairHash {
    std::size_t operator()(std::uint64_t key) const {
      key *= 0x9e3779b97f4a7c15u;  // std::hash is the identity, which collides on packed pairs
      return static_cast<std::size_t>(key ^ (key >> 29));
    }
  };
  const Merge* find_merge(std::int32_t left, std::int32_t right) const;  // null when the pair does not merge
  void start_symbols(std::string_view piece, std::vector<std::int32_t>& symbols) const;

  BpeOptions options_;
  std::array<std::int32_t, 256> byte_ids_{};  // -1 where the vocabulary lacks the byte
  std::unordered_map<std::uint64_t, Merge, PairHash> merges_;
  std::unordered_map<std::string, std::int32_t> whole_;  // bytes -> id, for ignore_merges only
};

}  // namespace basin::text
