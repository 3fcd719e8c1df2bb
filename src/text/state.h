// What a tokenizer is made of, whichever file it came from.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"
#include "text/scored_bpe.h"
#include "text/tokenizer.h"

namespace basin::text {

struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool special = false;
  bool strips_left = false;   // takes the white space before it
  bool strips_right = false;  // and after it
  bool normalized = false;    // looked for after normalisation, in its normalised form
};

/// Finds added tokens: leftmost, the longest among those that start at the same byte. Some vocabularies have thousands
/// that start alike, so the lengths are tried, not the tokens.
class AddedTokenFinder {
 public:
  /// Of two tokens with the same spelling the first is found.
  void add(const AddedToken& token, std::string spelling);
  struct Found {
    std::size_t begin, end;   // of the spelling itself
    const AddedToken* token;  // null: none
  };
  Found find(std::string_view text, std::size_t from, bool parse_special) const;

 private:
  std::unordered_map<std::string, AddedToken, StringHash, std::equal_to<>> tokens_;  // by spelling
  std::array<std::vector<std::size_t>, 256> lengths_;  // of the spellings by their first byte, longest first
};

struct Tokenizer::State {
  struct Entry {
    std::string bytes;  // what the token stands for
    bool special = false;
  };
  std::vector<Entry> entries;               // by id; ids without a token have no bytes
  Vocabulary ids;                           // by spelling, added tokens by content
  std::vector<bool> excluded;               // by id: what plain text never becomes
  std::unique_ptr<const PieceModel> model;  // refers to `ids` and `excluded`
  PreTokenizer pre_tokenizer;
  Normalizer normalizer;
  bool strips_first_space = false;
  AddedTokenFinder raw_tokens, normalized_tokens;
  std::optional<std::int32_t> bos;
  bool adds_bos = false;
  std::vector<std::int32_t> stops;
};

/// What the readers gather. finish() checks it as a whole.
struct Definition {
  Vocabulary vocabulary;      // of the model
  Bpe::Merges merges;         // of a model without scores
  std::vector<float> scores;  // by id, not empty: SentencePiece's BPE
  BpeOptions bpe;             // with scores: byte_tokens and unknown only
  std::vector<AddedToken> added;
  std::vector<std::int32_t> unused;  // tokens that no text becomes
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  bool metaspace = false;           // U+2581 in tokens is a space
  bool strips_first_space = false;  // the text of all tokens loses a space at its start
  std::optional<std::int32_t> bos;
  bool adds_bos = false;
  std::vector<std::int32_t> stops;
};

/// Throws Error(corrupt): ids that are negative, too large or given twice, merges outside the vocabulary.
std::unique_ptr<Tokenizer::State> finish(Definition definition);

/// Special tokens that end a text or a turn in the known chat formats.
bool ends_turn(std::string_view content);

}  // namespace basin::text
