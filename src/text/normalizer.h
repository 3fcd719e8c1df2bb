// What happens to a text before it is cut into pieces.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace basin::text {

/// U+2581, which stands for a space in SentencePiece's vocabularies.
inline constexpr std::string_view kMetaspace = "\xe2\x96\x81";

/// Canonical composition of well-formed UTF-8.
std::string to_nfc(std::string_view text);

std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

struct NormalizerStep {
  enum Kind { nfc, replace, prepend } kind;
  std::string from = {};  // replace: not empty
  std::string to = {};    // replace; prepend: what stands before every text that is not empty
};

class Normalizer {
 public:
  Normalizer() = default;
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  bool empty() const { return steps_.empty(); }
  std::string apply(std::string_view text) const;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace basin::text
