// SentencePiece's BPE: neighbours are merged when their text is a token, the one with the highest score first.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "text/vocabulary.h"

namespace basin::text {

struct ScoredBpeOptions {
  std::vector<float> scores;            // by id
  ByteTokens byte_tokens;               // what characters without a token become
  std::optional<std::int32_t> unknown;  // for a run of characters without tokens for their bytes either
};

class ScoredBpe : public PieceModel {
 public:
  /// Keeps references to the parts of `vocabulary`.
  ScoredBpe(const PlainVocabulary& vocabulary, ScoredBpeOptions options);

  void encode(std::string_view piece, std::vector<std::int32_t>& ids) const override;

 private:
  PlainVocabulary vocabulary_;
  ScoredBpeOptions options_;
  std::size_t longest_ = 0;  // bytes of the longest token, so that no longer text is looked up
};

}  // namespace basin::text
