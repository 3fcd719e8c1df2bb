// Byte-level BPE and SentencePiece tokenizers, from tokenizer.json or GGUF metadata.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace basin::weights {
struct GgufFile;
}

namespace basin::text {

class Tokenizer {
 public:
  /// Reads `tokenizer.json` (and `tokenizer_config.json` beside it, if any). Throws Error(unsupported) naming the
  /// component (normaliser, pre-tokeniser, model, decoder) that is not known, Error(corrupt | not_found).
  static Tokenizer from_directory(const std::filesystem::path& directory);
  static Tokenizer from_gguf(const weights::GgufFile& file);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Token ids of UTF-8 text, without BOS. Special tokens spelled in `text` become their ids only when
  /// `parse_special`. Throws Error(invalid_argument) with the byte offset when `text` is not UTF-8.
  std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const;

  /// The bytes a token stands for (may be a part of a UTF-8 sequence). Special tokens give their name when
  /// `show_special`, else nothing. Throws Error(invalid_argument) for ids outside the vocabulary.
  std::string token_bytes(std::int32_t id, bool show_special) const;

  /// Concatenated bytes; incomplete or invalid UTF-8 becomes U+FFFD.
  std::string decode(std::span<const std::int32_t> ids, bool show_special) const;

  std::int64_t vocabulary() const;
  std::optional<std::int32_t> bos() const;
  bool adds_bos() const;                        // the tokenizer says BOS is prepended to a text
  std::span<const std::int32_t> stops() const;  // end of text, end of turn
  std::optional<std::int32_t> id_of(
      std::string_view token) const;  // exact vocabulary entry, special ones included

  struct State;  // src/text/state.h

 private:
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// First byte offset at which `text` is not well-formed UTF-8 (no overlong forms, no surrogates), or nothing.
std::optional<std::size_t> first_invalid_utf8(std::string_view text);

/// Turns a stream of token bytes into text that is cut at UTF-8 boundaries only.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  // what is complete now; invalid bytes become U+FFFD
  std::string finish();                      // what is left, as U+FFFD
 private:
  std::string pending_;
};

}  // namespace basin::text
