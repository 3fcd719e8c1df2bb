// What a tokenizer is made of, whichever file it came from.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"
#include "text/pretokenizer.h"
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

/// Finds added tokens: leftmost, the longest among those that start at the same byte.
class AddedTokenFinder {
 public:
  void add(const AddedToken& token, std::string spelling);
  struct Found {
    std::size_t begin, end;   // of the spelling itself
    const AddedToken* token;  // null: none
  };
  Found find(std::string_view text, std::size_t from, bool parse_special) const;
  void sort();

 private:
  struct Entry {
    std::string spelling;
    AddedToken token;
  };
  std::array<std::vector<Entry>, 256> by_first_byte_;
};

struct Tokenizer::State {
  struct Entry {
    std::string bytes;  // what the token stands for
    bool special = false;
  };
  std::vector<Entry> entries;  // by id; ids without a token have no bytes
  Vocabulary ids;              // by spelling, added tokens by content
  std::optional<Bpe> bpe;
  PreTokenizer pre_tokenizer;
  bool nfc = false;
  AddedTokenFinder raw_tokens, normalized_tokens;
  std::optional<std::int32_t> bos;
  bool adds_bos = false;
  std::vector<std::int32_t> stops;
};

/// What the readers gather. finish() checks it as a whole.
struct Definition {
  Vocabulary vocabulary;  // of the model, spelled in the byte alphabet
  std::vector<std::pair<std::string, std::string>> merges;
  BpeOptions bpe;
  std::vector<AddedToken> added;
  PreTokenizer pre_tokenizer;
  bool nfc = false;
  std::optional<std::int32_t> bos;
  bool adds_bos = false;
  std::vector<std::int32_t> stops;
};

/// Throws Error(corrupt): ids that are negative, too large or given twice, merges outside the vocabulary.
std::unique_ptr<Tokenizer::State> finish(Definition definition);

/// Canonical composition of well-formed UTF-8.
std::string to_nfc(std::string_view text);

/// Special tokens that end a text or a turn in the known chat formats.
bool ends_turn(std::string_view content);

/// The pre-tokenisers of known families, by the pattern that their tokenizer.json has.
extern const std::string_view kGpt2Pattern, kQwen2Pattern, kLlama3Pattern;

}  // namespace basin::text
