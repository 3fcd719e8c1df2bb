// A regular expression as the tokenizers package (Oniguruma) reads it, run by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace basin::text {

struct Span {
  std::size_t begin, end;
  bool match;
};

class Pattern {
 public:
  /// Throws Error(unsupported) naming the construct that is not known to mean the same in both engines,
  /// Error(corrupt) for an expression that does not compile.
  explicit Pattern(std::string_view expression);
  static Pattern literal(std::string_view text);
  /// Characters of category N, one or a run: the Digits pre-tokeniser.
  static Pattern digits(bool individual);

  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;
  ~Pattern();

  /// Matches and what lies between them, in order, covering `text`; well-formed UTF-8 is required. Empty matches
  /// are kept. Throws Error(unsupported) when a match runs out of the matcher's limits.
  std::vector<Span> find(std::string_view text) const;

 private:
  struct Compiled;
  explicit Pattern(std::unique_ptr<Compiled> compiled);
  std::unique_ptr<Compiled> compiled_;
};

/// `expression` with classes spelled out where PCRE2 and Oniguruma differ.
std::string pcre2_expression(std::string_view expression);

}  // namespace basin::text
