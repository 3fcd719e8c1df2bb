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

// A token outside of the byte alphabet stands for its own spelling, as in the tokenizers package.
std::string bytes_of_token(const std::string& spelling, const Definition& definition) {
  if (definition.metaspace) return replace_all(spelling, kMetaspace, " ");
  return definition.bpe.byte_level ? bytes_of_spelling(spelling).value_or(spelling) : spelling;
}

// What the token was found as, which is what normalisation makes of its content.
std::string bytes_of_added(const AddedToken& token, const Definition& definition) {
  const std::string found = token.normalized ? definition.normalizer.apply(token.content) : token.content;
  return definition.metaspace ? replace_all(found, kMetaspace, " ") : found;
}

void fill_entries(Definition& definition, Tokenizer::State& state) {
  state.entries.resize(table_size(definition));
  state.excluded.resize(state.entries.size());
  std::vector<bool> taken(state.entries.size());
  state.ids = std::move(definition.vocabulary);
  for (const auto& [spelling, id] : state.ids) {
    const auto i = static_cast<std::size_t>(id);
    if (taken[i])
      throw Error(ErrorCode::corrupt, fmt::format("id {} is given to two tokens, '{}' is one", id, spelling));
    taken[i] = true;
    state.entries[i].bytes = bytes_of_token(spelling, definition);
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
    state.entries[i] = {token.special ? token.content : bytes_of_added(token, definition), token.special};
    if (token.special) state.excluded[i] = true;
  }
}

void fill_byte_tokens(const ByteTokens& tokens, Tokenizer::State& state) {
  for (std::size_t byte = 0; byte < tokens.size(); ++byte) {
    if (tokens[byte] < 0) continue;
    const auto i = static_cast<std::size_t>(tokens[byte]);
    state.entries[i].bytes = std::string(1, static_cast<char>(static_cast<std::uint8_t>(byte)));
    state.excluded[i] = true;  // its name in a text is a text
  }
}

std::unique_ptr<const PieceModel> make_model(Definition& definition, const Tokenizer::State& state) {
  const PlainVocabulary plain{state.ids, state.excluded};
  if (definition.scores.empty())
    return std::make_unique<Bpe>(plain, definition.merges, std::move(definition.bpe));
  ScoredBpeOptions options;
  options.scores = std::move(definition.scores);
  options.scores.resize(state.entries.size());
  options.byte_tokens.fill(-1);
  if (definition.bpe.byte_tokens) options.byte_tokens = *definition.bpe.byte_tokens;
  options.unknown = definition.bpe.unknown;
  return std::make_unique<ScoredBpe>(plain, std::move(options));
}

}  // namespace

void AddedTokenFinder::add(const AddedToken& token, std::string spelling) {
  if (spelling.empty()) return;
  auto& lengths = lengths_[static_cast<std::uint8_t>(spelling[0])];
  const auto place = std::lower_bound(lengths.begin(), lengths.end(), spelling.size(), std::greater<>{});
  if (place == lengths.end() || *place != spelling.size()) lengths.insert(place, spelling.size());
  tokens_.emplace(std::move(spelling), token);
}

AddedTokenFinder::Found AddedTokenFinder::find(std::string_view text, std::size_t from,
                                               bool parse_special) const {
  for (std::size_t i = from; i < text.size(); ++i) {
    for (const std::size_t length : lengths_[static_cast<std::uint8_t>(text[i])]) {
      if (length > text.size() - i) continue;
      const auto found = tokens_.find(text.substr(i, length));
      if (found == tokens_.end() || (found->second.special && !parse_special)) continue;
      return {i, i + length, &found->second};
    }
  }
  return {text.size(), text.size(), nullptr};
}

std::unique_ptr<Tokenizer::State> finish(Definition definition) {
  auto state = std::make_unique<Tokenizer::State>();
  if (definition.vocabulary.empty()) throw Error(ErrorCode::corrupt, "the tokenizer's vocabulary is empty");
  fill_entries(definition, *state);
  if (definition.bpe.byte_tokens) fill_byte_tokens(*definition.bpe.byte_tokens, *state);
  for (const std::int32_t id : definition.unused) state->excluded[static_cast<std::size_t>(id)] = true;
  for (const AddedToken& token : definition.added) {
    if (token.special && ends_turn(token.content)) definition.stops.push_back(token.id);
    if (token.normalized) {
      state->normalized_tokens.add(token, definition.normalizer.apply(token.content));
    } else {
      state->raw_tokens.add(token, token.content);
    }
  }
  state->model = make_model(definition, *state);
  state->pre_tokenizer = std::move(definition.pre_tokenizer);
  state->normalizer = std::move(definition.normalizer);
  state->strips_first_space = definition.strips_first_space;

  const auto known = [&](std::int32_t id) {
    return id >= 0 && static_cast<std::size_t>(id) < state->entries.size();
  };
  if (definition.bos && !known(*definition.bos)) {
    throw Error(ErrorCode::corrupt, fmt::format("BOS id {} is outside the vocabulary", *definition.bos));
  }
  if (definition.bpe.unknown && !known(*definition.bpe.unknown)) {
    throw Error(ErrorCode::corrupt,
                fmt::format("id {} of the unknown token is outside the vocabulary", *definition.bpe.unknown));
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
  static constexpr std::array<std::string_view, 9> kNames = {
      "<|im_end|>",      "<end_of_turn>", "<｜end▁of▁sentence｜>",
      "<|endoftext|>",   "<|eot_id|>",    "<|eom_id|>",
      "<|end_of_text|>", "<|return|>",    "<|call|>"};
  return std::find(kNames.begin(), kNames.end(), content) != kNames.end();
}

}  // namespace basin::text
