#include "text/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 21;  // eight times the largest vocabulary in use

void check_id(std::int32_t id, std::string_view token) {
  if (id < 0 || id >= kMaxTokens) {
    throw Error(ErrorCode::corrupt,
                fmt::format("token '{}' has id {}; allowed are 0 to {}", token, id, kMaxTokens - 1));
  }
}

std::size_t table_size(const Definition& definition) {
  std::int32_t last = -1;
  for (const auto& [spelling, id] : definition.vocabulary) {
    check_id(id, spelling);
    last = std::max(last, id);
  }
  for (const AddedToken& token : definition.added) {
    check_id(token.id, token.content);
    last = std::max(last, token.id);
  }
  return static_cast<std::size_t>(last) + 1;
}

void fill_entries(const Definition& definition, Tokenizer::State& state) {
  state.entries.resize(table_size(definition));
  std::vector<bool> taken(state.entries.size());
  for (const auto& [spelling, id] : definition.vocabulary) {
    const auto i = static_cast<std::size_t>(id);
    if (taken[i])
      throw Error(ErrorCode::corrupt, fmt::format("id {} is given to two tokens, '{}' is one", id, spelling));
    taken[i] = true;
    // A token outside of the byte alphabet stands for its own spelling, as in the tokenizers package.
    state.entries[i].bytes = bytes_of_spelling(spelling).value_or(spelling);
  }
  for (const AddedToken& token : definition.added) {
    const auto i = static_cast<std::size_t>(token.id);
    const auto known = state.ids.find(token.content);
    const bool same = known != state.ids.end() && known->second == token.id;
    if (token.content.empty() || (known != state.ids.end() && !same) || (taken[i] && !same)) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("added token '{}' with id {} contradicts the vocabulary or is empty",
                              token.content, token.id));
    }
    taken[i] = true;
    state.ids.emplace(token.content, token.id);
    state.entries[i] = {token.content, token.special};
  }
}

}  // namespace

void AddedTokenFinder::add(const AddedToken& token, std::string spelling) {
  if (spelling.empty()) return;
  const auto first = static_cast<std::uint8_t>(spelling[0]);
  by_first_byte_[first].push_back({std::move(spelling), token});
}

void AddedTokenFinder::sort() {
  for (auto& entries : by_first_byte_) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.spelling.size() > b.spelling.size(); });
  }
}

AddedTokenFinder::Found AddedTokenFinder::find(std::string_view text, std::size_t from,
                                               bool parse_special) const {
  for (std::size_t i = from; i < text.size(); ++i) {
    for (const Entry& entry : by_first_byte_[static_cast<std::uint8_t>(text[i])]) {
      if (entry.token.special && !parse_special) continue;
      if (text.substr(i).starts_with(entry.spelling)) return {i, i + entry.spelling.size(), &entry.token};
    }
  }
  return {text.size(), text.size(), nullptr};
}

std::unique_ptr<Tokenizer::State> finish(Definition definition) {
  auto state = std::make_unique<Tokenizer::State>();
  if (definition.vocabulary.empty()) throw Error(ErrorCode::corrupt, "the tokenizer's vocabulary is empty");
  state->ids = definition.vocabulary;
  fill_entries(definition, *state);
  for (const AddedToken& token : definition.added) {
    if (token.special && ends_turn(token.content)) definition.stops.push_back(token.id);
    if (token.normalized) {
      state->normalized_tokens.add(token, definition.nfc ? to_nfc(token.content) : token.content);
    } else {
      state->raw_tokens.add(token, token.content);
    }
    if (token.special)
      definition.vocabulary.erase(token.content);  // plain text must never become a special token
  }
  state->raw_tokens.sort();
  state->normalized_tokens.sort();
  // Merges may not lead to special tokens either: they were just taken out of the vocabulary.
  state->bpe.emplace(definition.vocabulary, definition.merges, definition.bpe);
  state->pre_tokenizer = std::move(definition.pre_tokenizer);
  state->nfc = definition.nfc;

  const auto known = [&](std::int32_t id) {
    return id >= 0 && static_cast<std::size_t>(id) < state->entries.size();
  };
  if (definition.bos && !known(*definition.bos)) {
    throw Error(ErrorCode::corrupt, fmt::format("BOS id {} is outside the vocabulary", *definition.bos));
  }
  if (definition.adds_bos && !definition.bos) {
    throw Error(ErrorCode::corrupt, "the tokenizer asks for a BOS token but does not name one");
  }
  state->bos = definition.bos;
  state->adds_bos = definition.adds_bos;
  for (const std::int32_t id : definition.stops) {
    if (!known(id))
      throw Error(ErrorCode::corrupt, fmt::format("end-of-text id {} is outside the vocabulary", id));
    state->entries[static_cast<std::size_t>(id)].special = true;
  }
  state->stops = std::move(definition.stops);
  std::sort(state->stops.begin(), state->stops.end());
  state->stops.erase(std::unique(state->stops.begin(), state->stops.end()), state->stops.end());
  return state;
}

bool ends_turn(std::string_view content) {
  static constexpr std::array<std::string_view, 7> kNames = {
      "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|return|>", "<|call|>"};
  return std::find(kNames.begin(), kNames.end(), content) != kNames.end();
}

}  // namespace basin::text
