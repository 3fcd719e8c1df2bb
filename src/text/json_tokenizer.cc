// Tokenizer from a directory in the Hugging Face layout.
#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "text/json_pipeline.h"
#include "text/state.h"
#include "weights/json_file.h"

namespace basin::text {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxBytes = 1u << 30;  // far beyond any in use

json read_json(const std::filesystem::path& path) {
  return weights::read_json_object(path, kMaxBytes);
}

json read_optional_json(const std::filesystem::path& path) {
  return std::filesystem::exists(path) ? read_json(path) : json::object();
}

const json& member_or_null(const json& object, const char* key) {
  static const json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

bool flag(const json& object, const char* key) {
  const json& value = member_or_null(object, key);
  return value.is_null() ? false : value.get<bool>();
}

std::int32_t read_id(const json& value, std::string_view token) {
  if (value.is_number_integer()) {
    const bool huge = value.is_number_unsigned() &&
                      value.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int32_t>::max()};
    if (!huge && value.get<std::int64_t>() >= 0) return value.get<std::int32_t>();
  }
  throw Error(ErrorCode::corrupt, fmt::format("token '{}': {} is not a token id", token, value.dump()));
}

std::pair<std::string, std::string> read_merge(const json& merge) {
  if (merge.is_array()) {
    if (merge.size() != 2)
      throw Error(ErrorCode::corrupt, fmt::format("merge {} does not have two parts", merge.dump()));
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  const auto text = merge.get<std::string>();
  const std::size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
    throw Error(ErrorCode::corrupt, fmt::format("merge '{}' does not have two parts", text));
  }
  return {text.substr(0, space), text.substr(space + 1)};
}

void refuse_options(const json& model) {
  const auto refuse = [](std::string_view option) {
    throw Error(ErrorCode::unsupported,
                fmt::format("tokenizer.json: BPE option '{}' is not supported", option));
  };
  const json& dropout = member_or_null(model, "dropout");
  if (!dropout.is_null() && dropout.get<double>() != 0) refuse("dropout");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json& value = member_or_null(model, key);
    if (!value.is_null() && !value.get<std::string>().empty()) refuse(key);
  }
}

void read_model(const json& model, Definition& definition) {
  // Old files leave the type out.
  const std::string type = model.value("type", "BPE");
  if (type != "BPE")
    throw Error(ErrorCode::unsupported, fmt::format("tokenizer.json: model '{}' is not supported", type));
  refuse_options(model);
  const json& vocabulary = model.at("vocab");
  if (!vocabulary.is_object()) throw Error(ErrorCode::corrupt, "model.vocab is not an object");
  definition.vocabulary.reserve(vocabulary.size());
  for (const auto& [token, id] : vocabulary.items()) definition.vocabulary.emplace(token, read_id(id, token));
  const json& merges = model.at("merges");
  if (!merges.is_array()) throw Error(ErrorCode::corrupt, "model.merges is not an array");
  definition.merges.reserve(merges.size());
  for (const json& merge : merges) definition.merges.push_back(read_merge(merge));
  definition.bpe.ignore_merges = flag(model, "ignore_merges");
  definition.bpe.fuse_unknown = flag(model, "fuse_unk");
  const json& unknown = member_or_null(model, "unk_token");
  if (!unknown.is_null() && !unknown.get<std::string>().empty()) {
    const auto found = definition.vocabulary.find(unknown.get<std::string>());
    if (found == definition.vocabulary.end()) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("unk_token '{}' is not in the vocabulary", unknown.get<std::string>()));
    }
    definition.bpe.unknown = found->second;
  }
}

void read_added(const json& tokens, Definition& definition) {
  if (tokens.is_null()) return;
  if (!tokens.is_array()) throw Error(ErrorCode::corrupt, "added_tokens is not an array");
  for (const json& token : tokens) {
    AddedToken added;
    added.content = token.at("content").get<std::string>();
    added.id = read_id(token.at("id"), added.content);
    added.special = flag(token, "special");
    added.strips_left = flag(token, "lstrip");
    added.strips_right = flag(token, "rstrip");
    added.normalized = token.contains("normalized") ? flag(token, "normalized") : !added.special;
    if (flag(token, "single_word")) {
      throw Error(
          ErrorCode::unsupported,
          fmt::format("tokenizer.json: added token '{}': single_word is not supported", added.content));
    }
    definition.added.push_back(std::move(added));
  }
}

/// The tokens <0x00> to <0xFF>.
ByteTokens find_byte_tokens(const Vocabulary& vocabulary) {
  ByteTokens tokens{};
  for (std::size_t byte = 0; byte < tokens.size(); ++byte) {
    const auto found = vocabulary.find(byte_token_name(static_cast<std::uint8_t>(byte)));
    tokens[byte] = found == vocabulary.end() ? -1 : found->second;
  }
  return tokens;
}

/// How pieces are spelled must agree between the cutting, the model and the decoder.
void read_spelling(const json& document, Definition& definition) {
  Cutting cutting = read_pre_tokenizer(member_or_null(document, "pre_tokenizer"));
  const Decoding decoding = read_decoder(member_or_null(document, "decoder"));
  const bool fallback = flag(document.at("model"), "byte_fallback");
  const bool byte_level_decoder =
      decoding.byte_level || (member_or_null(document, "decoder").is_null() && cutting.byte_level);
  if (cutting.byte_level != byte_level_decoder) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.json: ByteLevel in only one of pre-tokeniser and decoder is not supported");
  }
  if (fallback != decoding.byte_tokens) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.json: byte_fallback in only one of model and decoder is not supported");
  }
  if (!cutting.byte_level && !decoding.metaspace) {
    throw Error(ErrorCode::unsupported,
                "tokenizer.json: tokens spelled neither by ByteLevel nor with U+2581 are not supported");
  }
  definition.pre_tokenizer = std::move(cutting.pre_tokenizer);
  definition.bpe.byte_level = cutting.byte_level;
  definition.metaspace = decoding.metaspace;
  definition.strips_first_space = decoding.strips_first_space;
  if (fallback) definition.bpe.byte_tokens = find_byte_tokens(definition.vocabulary);
}

std::optional<std::int32_t> find_token(const Definition& definition, const std::string& content) {
  for (const AddedToken& token : definition.added) {
    if (token.content == content) return token.id;
  }
  const auto found = definition.vocabulary.find(content);
  return found == definition.vocabulary.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::int32_t> named_token(const json& config, const char* key, const Definition& definition) {
  const json& value = member_or_null(config, key);
  if (value.is_null()) return std::nullopt;
  const auto content = value.is_object() ? value.at("content").get<std::string>() : value.get<std::string>();
  const auto id = find_token(definition, content);
  if (!id)
    throw Error(ErrorCode::corrupt,
                fmt::format("tokenizer_config.json: {} '{}' is not in the vocabulary", key, content));
  return id;
}

void read_ends(const json& post_processor, const json& config, const json& generation,
               Definition& definition) {
  definition.bos = named_token(config, "bos_token", definition);
  if (const auto first = read_post_processor(post_processor)) {
    definition.bos = find_token(definition, *first);
    if (!definition.bos) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("tokenizer.json: post-processor token '{}' is not in the vocabulary", *first));
    }
    definition.adds_bos = true;
  }
  if (!member_or_null(config, "add_bos_token").is_null()) definition.adds_bos = flag(config, "add_bos_token");
  if (flag(config, "add_eos_token")) {
    throw Error(ErrorCode::unsupported, "tokenizer_config.json: add_eos_token is not supported");
  }
  if (const auto eos = named_token(config, "eos_token", definition)) definition.stops.push_back(*eos);
  const json& eos = member_or_null(generation, "eos_token_id");
  if (eos.is_array()) {
    for (const json& id : eos) definition.stops.push_back(read_id(id, "eos_token_id"));
  } else if (!eos.is_null()) {
    definition.stops.push_back(read_id(eos, "eos_token_id"));
  }
}

}  // namespace

Tokenizer Tokenizer::from_directory(const std::filesystem::path& directory) {
  const auto path = directory / "tokenizer.json";
  if (!std::filesystem::exists(path)) {
    throw Error(ErrorCode::not_found, fmt::format("'{}' does not exist", path.string()),
                "the model needs its tokenizer.json beside the weights");
  }
  const json document = read_json(path);
  const json config = read_optional_json(directory / "tokenizer_config.json");
  const json generation = read_optional_json(directory / "generation_config.json");
  try {
    // `truncation` and `padding` shape batches for other programs and do not change what a text's ids are.
    Definition definition;
    definition.normalizer = read_normalizer(member_or_null(document, "normalizer"));
    read_model(document.at("model"), definition);
    read_spelling(document, definition);
    read_added(member_or_null(document, "added_tokens"), definition);
    read_ends(member_or_null(document, "post_processor"), config, generation, definition);
    return Tokenizer(finish(std::move(definition)));
  } catch (const json::exception& error) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: {}", directory.string(), error.what()));
  } catch (const Error& error) {  // which knows the member, not the directory
    throw error.in(directory.string());
  }
}

}  // namespace basin::text
