// Tokenizer from GGUF metadata (tokenizer.ggml.*).
#include <fmt/format.h>

#include <limits>

#include "basin/base/error.h"
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

std::vector<SplitStep> steps(std::string_view first, std::string_view second = {}) {
  std::vector<SplitStep> result;
  result.push_back({Pattern(first)});
  if (!second.empty()) result.push_back({Pattern(second)});
  return result;
}

/// Fills what the name of the pre-tokeniser stands for.
void set_family(std::string_view name, Definition& definition) {
  if (name == "gpt-2") {
    definition.pre_tokenizer = PreTokenizer(steps(kGpt2Pattern));
  } else if (name == "smollm") {
    std::vector<SplitStep> both;
    both.push_back({Pattern::digits(true)});
    both.push_back({Pattern(kGpt2Pattern)});
    definition.pre_tokenizer = PreTokenizer(std::move(both));
  } else if (name == "qwen2") {
    definition.pre_tokenizer = PreTokenizer(steps(kQwen2Pattern));
    definition.nfc = true;
  } else if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    definition.pre_tokenizer = PreTokenizer(steps(kLlama3Pattern));
    definition.bpe.ignore_merges = true;
    definition.adds_bos = true;
  } else {
    throw Error(
        ErrorCode::unsupported, fmt::format("pre-tokeniser '{}' (tokenizer.ggml.pre) is not known", name),
        "known are gpt-2, smollm, qwen2 and llama-bpe; or use the model's directory with tokenizer.json");
  }
}

enum TokenType : std::int64_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

void read_tokens(const GgufFile& file, Definition& definition) {
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
    const auto id = static_cast<std::int32_t>(i);
    if (!definition.vocabulary.emplace(tokens[i], id).second) {
      throw Error(ErrorCode::corrupt, fmt::format("GGUF metadata: token '{}' appears twice", tokens[i]));
    }
    const std::int64_t type = types != nullptr ? (*types)[i] : normal;
    if (type == control || type == unknown || type == user_defined) {
      AddedToken added;
      added.id = id;
      added.content = tokens[i];
      added.special = type != user_defined;
      definition.added.push_back(std::move(added));
    } else if (type == byte) {
      throw Error(ErrorCode::unsupported, "GGUF metadata: byte-fallback tokens in a byte-level tokenizer");
    } else if (type != normal && type != unused) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("GGUF metadata: token {} has the unknown type {}", i, type));
    }
  }
}

}  // namespace

Tokenizer Tokenizer::from_gguf(const GgufFile& file) {
  const auto& model = require<std::string>(file, "tokenizer.ggml.model");
  if (model != "gpt2") {
    throw Error(ErrorCode::unsupported,
                fmt::format("tokenizer model '{}' (tokenizer.ggml.model) is not supported", model),
                "only byte-level BPE ('gpt2') is");
  }
  Definition definition;
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
  if (const bool* adds = find<bool>(file, "tokenizer.ggml.add_bos_token")) definition.adds_bos = *adds;
  if (const bool* adds = find<bool>(file, "tokenizer.ggml.add_eos_token"); adds != nullptr && *adds) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.ggml.add_eos_token: a token after every text is not supported");
  }
  if (const bool* prefix = find<bool>(file, "tokenizer.ggml.add_space_prefix");
      prefix != nullptr && *prefix) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.ggml.add_space_prefix is not supported with byte-level BPE");
  }
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (const auto id = find_id(file, key)) definition.stops.push_back(*id);
  }
  return Tokenizer(finish(std::move(definition)));
}

}  // namespace basin::text
