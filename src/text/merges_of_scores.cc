#include "text/merges_of_scores.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "text/utf8.h"

namespace basin::text {
namespace {

using Ids = std::unordered_map<std::string_view, std::size_t>;

struct Found {
  float score;
  std::size_t token, left, right;
};

}  // namespace

MergeList merges_of_scores(const std::vector<std::string>& spellings, const std::vector<float>& scores,
                           const std::vector<bool>& take_part) {
  Ids ids;
  for (std::size_t id = 0; id < spellings.size(); ++id) {
    if (take_part[id]) ids.emplace(spellings[id], id);
  }
  std::vector<Found> found;
  for (const auto& [spelling, token] : ids) {
    for (std::size_t at = first_character(spelling).bytes; at < spelling.size();
         at += first_character(spelling.substr(at)).bytes) {
      const auto left = ids.find(spelling.substr(0, at)), right = ids.find(spelling.substr(at));
      if (left != ids.end() && right != ids.end())
        found.push_back({scores[token], token, left->second, right->second});
    }
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tuple(-a.score, a.token, a.left, a.right) < std::tuple(-b.score, b.token, b.left, b.right);
  });
  MergeList merges;
  merges.reserve(found.size());
  for (const Found& each : found) merges.emplace_back(spellings[each.left], spellings[each.right]);
  return merges;
}

std::vector<float> scores_of_merges(const std::vector<std::string>& spellings, const MergeList& merges) {
  Ids ids;
  for (std::size_t id = 0; id < spellings.size(); ++id) ids.emplace(spellings[id], id);
  std::vector<std::int64_t> rank(spellings.size(), -1);
  std::int64_t next = 0;
  for (const auto& [left, right] : merges) {
    const auto token = ids.find(left + right);
    if (token != ids.end() && rank[token->second] < 0) rank[token->second] = next++;
  }
  std::vector<float> scores;
  scores.reserve(spellings.size());
  for (const std::int64_t known : rank) scores.push_back(-static_cast<float>(known >= 0 ? known : next++));
  return scores;
}

}  // namespace basin::text
