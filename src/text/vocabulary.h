// Tokens by spelling, and what turns the pieces of a text into them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace basin::text {

struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};

using Vocabulary =
    std::unordered_map<std::string, std::int32_t, StringHash, std::equal_to<>>;  // spelling -> id

/// The tokens that stand for single bytes, -1 where there is none.
using ByteTokens = std::array<std::int32_t, 256>;

/// What plain text may become: a vocabulary without its special tokens.
struct PlainVocabulary {
  const Vocabulary& ids;
  const std::vector<bool>& excluded;  // by id

  /// -1 when `spelling` is no token, or one that plain text must never become.
  std::int32_t find(std::string_view spelling) const {
    const auto found = ids.find(spelling);
    return found == ids.end() || excludes(found->second) ? -1 : found->second;
  }
  bool excludes(std::int32_t id) const { return excluded[static_cast<std::size_t>(id)]; }
};

/// How SentencePiece names the token of a byte: <0x0A>.
std::string byte_token_name(std::uint8_t byte);

/// Appends the tokens of every byte of `text`, or returns false and appends nothing when one of them has none.
bool append_bytes(std::string_view text, const ByteTokens& tokens, std::vector<std::int32_t>& ids);

class PieceModel {
 public:
  virtual ~PieceModel() = default;
  PieceModel() = default;
  PieceModel(const PieceModel&) = delete;
  PieceModel& operator=(const PieceModel&) = delete;

  /// Appends the ids of one piece of well-formed UTF-8, shorter than 2 GiB. O(n log n) in its bytes.
  virtual void encode(std::string_view piece, std::vector<std::int32_t>& ids) const = 0;
};

}  // namespace basin::text
