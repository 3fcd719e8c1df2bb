// SentencePiece's BPE orders merges by the score of what they give, the tokenizers package by a list of pairs.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace basin::text {

using MergeList = std::vector<std::pair<std::string, std::string>>;

/// Every way to make a token of two others, the token with the highest score first; of equals the lower ids. Tokens that do not
/// `take_part` are neither made nor parts.
MergeList merges_of_scores(const std::vector<std::string>& spellings, const std::vector<float>& scores,
                           const std::vector<bool>& take_part);

/// Scores that order tokens as these merges do: 0 for what the first gives, and one less for each that follows. What no merge gives comes
/// behind, in the order of ids.
std::vector<float> scores_of_merges(const std::vector<std::string>& spellings, const MergeList& merges);

}  // namespace basin::text
