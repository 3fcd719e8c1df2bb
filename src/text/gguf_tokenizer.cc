// Tokenizer from GGUF metadata (tokenizer.ggml.*).
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "basin/base/error.h"
#include "text/families.h"
#include "text/state.h"
#include "weights/gguf.h"

namespace basin::text {
namespace {

using weights::GgufFile;

template <typename T>
const T* find(const GgufFile& file, const std::string& key) {
  const auto found = file.metadata.find(key);
  if (found == file.metadata.end()) return nullptr;
  const T* value = std::get_if<T>(&found->second);
  if (value == nullptr)
    throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: '{}' has the wrong type", key));
  return value;
}

template <typename T>
const T& require(const GgufFile& file, const std::string& key) {
  if (const T* value = find<T>(file, key)) return *value;
  throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: '{}' is missing", key));
}

std::optional<std::int32_t> find_id(const GgufFile& file, const std::string& key) {
  const auto found = file.metadata.find(key);
  if (found == file.metadata.end()) return std::nullopt;
  constexpr auto kMax = std::numeric_limits<std::int32_t>::max();
  if (const auto* u = std::get_if<std::uint64_t>(&found->second); u != nullptr && *u <= kMax) {
    return static_cast<std::int32_t>(*u);
  }
  if (const auto* i = std::get_if<std::int64_t>(&found->second); i != nullptr && *i >= 0 && *i <= kMax) {
    return static_cast<std::int32_t>(*i);
  }
  throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: '{}' is not a token id", key));
}

enum TokenType : std::int64_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

bool flag(const GgufFile& file, const std::string& key, bool absent) {
  const bool* value = find<bool>(file, key);
  return value != nullptr ? *value : absent;
}

std::vector<float> read_scores(const GgufFile& file, std::size_t tokens) {
  const auto& scores = require<std::vector<double>>(file, "tokenizer.ggml.scores");
  if (scores.size() != tokens) {
    throw Error(ErrorCode::corrupt,
                fmt::format("GGUF metadata: {} scores for {} tokens", scores.size(), tokens));
  }
  std::vector<float> result;
  result.reserve(tokens);
  for (const double score : scores) {
    if (!std::isfinite(score))
      throw Error(ErrorCode::corrupt,
                  fmt::format("GGUF metadata: token {} has the score {}", result.size(), score));
    result.push_back(static_cast<float>(score));
  }
  return result;
}

/// The byte that the token <0xNN> stands for.
std::uint8_t byte_of(std::string_view name) {
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (name == byte_token_name(static_cast<std::uint8_t>(byte))) return static_cast<std::uint8_t>(byte);
  }
  throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: '{}' names no byte, as <0x0A> does", name));
}

void read_token(const std::string& spelling, std::int32_t id, std::int64_t type, Definition& definition) {
  if (!definition.vocabulary.emplace(spelling, id).second) {
    throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: token '{}' appears twice", spelling));
  }
  if (type == control || type == unknown || type == user_defined) {
    AddedToken added;
    added.id = id;
    added.content = spelling;
    added.special = type != user_defined;
    definition.added.push_back(std::move(added));
  } else if (type == byte) {
    if (definition.bpe.byte_level)
      throw Error(ErrorCode::unsupported, "GGUF metadata: byte-fallback tokens in a byte-level tokenizer");
    (*definition.bpe.byte_tokens)[byte_of(spelling)] = id;
  } else if (type == unused && !definition.bpe.byte_level) {
    definition.unused.push_back(id);
  } else if (type != normal && type != unused) {
    throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: token {} has the unknown type {}", id, type));
  }
}

std::size_t read_tokens(const GgufFile& file, Definition& definition) {
  const auto& tokens = require<std::vector<std::string>>(file, "tokenizer.ggml.tokens");
  const auto* types = find<std::vector<std::int64_t>>(file, "tokenizer.ggml.token_type");
  if (types != nullptr && types->size() != tokens.size()) {
    throw Error(ErrorCode::corrupt,
                fmt::format("GGUF metadata: {} token types for {} tokens", types->size(), tokens.size()));
  }
  if (tokens.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: {} tokens are too many", tokens.size()));
  }
  definition.vocabulary.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    read_token(tokens[i], static_cast<std::int32_t>(i), types != nullptr ? (*types)[i] : normal, definition);
  }
  return tokens.size();
}

void read_byte_level(const GgufFile& file, Definition& definition) {
  set_family(require<std::string>(file, "tokenizer.ggml.pre"), definition);
  read_tokens(file, definition);
  for (const std::string& merge : require<std::vector<std::string>>(file, "tokenizer.ggml.merges")) {
    const std::size_t space = merge.find(' ', 1);
    if (space == std::string::npos) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("GGUF metadata: merge '{}' does not have two parts", merge));
    }
    definition.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  definition.bos = find_id(file, "tokenizer.ggml.bos_token_id");
  if (flag(file, "tokenizer.ggml.add_space_prefix", false)) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.ggml.add_space_prefix is not supported with byte-level BPE");
  }
}

// SentencePiece's BPE. Keys that are absent have the values of Llama 2, with which the format began.
void read_sentence_piece(const GgufFile& file, Definition& definition) {
  definition.bpe.byte_level = false;
  definition.bpe.byte_tokens.emplace().fill(-1);
  definition.metaspace = true;
  definition.scores = read_scores(file, read_tokens(file, definition));
  std::vector<NormalizerStep> steps;
  if (flag(file, "tokenizer.ggml.add_space_prefix", true)) {
    steps.push_back({NormalizerStep::prepend, {}, " "});
    definition.strips_first_space = true;
  } else {
    // SentencePiece looks for the user's symbols in the text with U+2581; with a prefix they could not be told from it.
    for (AddedToken& token : definition.added) token.normalized = !token.special;
  }
  steps.push_back({NormalizerStep::replace, " ", std::string(kMetaspace)});
  definition.normalizer = Normalizer(std::move(steps));
  definition.adds_bos = true;
  definition.bos = find_id(file, "tokenizer.ggml.bos_token_id").value_or(1);
  definition.bpe.unknown = find_id(file, "tokenizer.ggml.unknown_token_id").value_or(0);
  definition.bpe.fuse_unknown = true;
  if (flag(file, "tokenizer.ggml.remove_extra_whitespaces", false))
    throw Error(ErrorCode::unsupported, "tokenizer.ggml.remove_extra_whitespaces is not supported");
}

}  // namespace

Tokenizer Tokenizer::from_gguf(const GgufFile& file) {
  const auto& model = require<std::string>(file, "tokenizer.ggml.model");
  Definition definition;
  if (model == "gpt2") {
    read_byte_level(file, definition);
  } else if (model == "llama") {
    read_sentence_piece(file, definition);
  } else {
    throw Error(ErrorCode::unsupported,
                fmt::format("tokenizer model '{}' (tokenizer.ggml.model) is not supported", model),
                "known are gpt2 (byte-level BPE) and llama (SentencePiece BPE)");
  }
  definition.adds_bos = flag(file, "tokenizer.ggml.add_bos_token", definition.adds_bos);
  if (flag(file, "tokenizer.ggml.add_eos_token", false)) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.ggml.add_eos_token: a token after every text is not supported");
  }
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (const auto id = find_id(file, key)) definition.stops.push_back(*id);
  }
  return Tokenizer(finish(std::move(definition)));
}

}  // namespace basin::text
