#include "text/tokenizer.h"

#include <fmt/format.h>

#include <limits>
#include <unordered_map>

#include "basin/base/error.h"
#include "text/state.h"
#include "text/utf8.h"

namespace basin::text {
namespace {

using Ids = std::vector<std::int32_t>;

/// Encodes plain text; pieces that occur again within one call are looked up.
class PieceEncoder {
 public:
  PieceEncoder(const PieceModel& model, const PreTokenizer& pre_tokenizer)
      : model_(model), pre_tokenizer_(pre_tokenizer) {}

  void encode(std::string_view text, bool first, Ids& ids) {
    for (std::string& piece : pre_tokenizer_.split(text, first)) {
      if (piece.size() > kLongestCached) {
        encode_long(piece, ids);
        continue;
      }
      const auto [entry, fresh] = cache_.try_emplace(std::move(piece));
      if (fresh) model_.encode(entry->first, entry->second);
      ids.insert(ids.end(), entry->second.begin(), entry->second.end());
    }
  }

 private:
  static constexpr std::size_t kLongestCached = 64;

  void encode_long(const std::string& piece, Ids& ids) const {
    if (piece.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
      throw Error(ErrorCode::invalid_argument, "a single word of 2 GiB or more cannot be tokenised");
    }
    model_.encode(piece, ids);
  }

  const PieceModel& model_;
  const PreTokenizer& pre_tokenizer_;
  std::unordered_map<std::string, Ids> cache_;
};

std::size_t before_white_space(std::string_view text, std::size_t from, std::size_t end) {
  while (end > from) {
    const std::size_t start = from + last_character(text.substr(from, end - from));
    if (!is_white_space(first_character(text.substr(start)).code_point)) break;
    end = start;
  }
  return end;
}

std::size_t after_white_space(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    const Utf8Step step = first_character(text.substr(at));
    if (!is_white_space(step.code_point)) break;
    at += step.bytes;
  }
  return at;
}

/// Calls plain(text) and token(id) in order of appearance.
template <typename Plain, typename Token>
void cut_at_tokens(std::string_view text, const AddedTokenFinder& finder, bool parse_special, Plain plain,
                   Token token) {
  std::size_t done = 0, from = 0;
  while (true) {
    const AddedTokenFinder::Found found = finder.find(text, from, parse_special);
    if (found.token == nullptr) break;
    const std::size_t begin =
        found.token->strips_left ? before_white_space(text, done, found.begin) : found.begin;
    const std::size_t end = found.token->strips_right ? after_white_space(text, found.end) : found.end;
    if (begin > done) plain(text.substr(done, begin - done));
    token(found.token->id);
    done = from = end;
  }
  if (done < text.size()) plain(text.substr(done));
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool parse_special) const {
  if (const auto offset = first_invalid_utf8(text)) {
    throw Error(ErrorCode::invalid_argument, fmt::format("text is not UTF-8: byte {} is invalid", *offset),
                "convert the text to UTF-8 first");
  }
  Ids ids;
  PieceEncoder encoder(*state_->model, state_->pre_tokenizer);
  bool first = true;  // nothing has come yet
  const auto token = [&](std::int32_t id) {
    ids.push_back(id);
    first = false;
  };
  const auto plain = [&](std::string_view part) {
    encoder.encode(part, first, ids);
    first = false;
  };
  const auto normalized = [&](std::string_view part) {
    cut_at_tokens(part, state_->normalized_tokens, parse_special, plain, token);
  };
  const auto raw = [&](std::string_view part) {
    if (state_->normalizer.empty()) {
      normalized(part);
    } else {
      normalized(state_->normalizer.apply(part));
    }
  };
  cut_at_tokens(text, state_->raw_tokens, parse_special, raw, token);
  return ids;
}

std::string Tokenizer::token_bytes(std::int32_t id, bool show_special) const {
  if (id < 0 || id >= vocabulary()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("token id {} is outside the vocabulary of {}", id, vocabulary()));
  }
  const State::Entry& entry = state_->entries[static_cast<std::size_t>(id)];
  return entry.special && !show_special ? std::string() : entry.bytes;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool show_special) const {
  Utf8Stream stream;
  std::string text;
  for (const std::int32_t id : ids) text += stream.push(token_bytes(id, show_special));
  text += stream.finish();
  if (state_->strips_first_space && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::int64_t Tokenizer::vocabulary() const {
  return static_cast<std::int64_t>(state_->entries.size());
}
std::optional<std::int32_t> Tokenizer::bos() const {
  return state_->bos;
}
bool Tokenizer::adds_bos() const {
  return state_->adds_bos;
}
std::span<const std::int32_t> Tokenizer::stops() const {
  return state_->stops;
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = state_->ids.find(token);
  return found == state_->ids.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace basin::text
