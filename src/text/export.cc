#include "text/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "text/chat_template.h"
#include "text/families.h"
#include "text/merges_of_scores.h"
#include "text/state.h"
#include "text/tokenizer.h"
#include "weights/json_file.h"
#include "weights/printable.h"

namespace basin::text {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::uint64_t kMaxTokenizerBytes = 256u << 20;
const std::string kPrefix = "tokenizer.ggml.";

// ggml's kinds of tokens.
enum TokenType : std::int32_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

// The steps of a family's pre-tokeniser, as tokenizer.json spells them.
ordered_json steps_of(const Family& family) {
  ordered_json steps = ordered_json::array();
  // ByteLevel's own pattern is GPT-2's.
  const bool own = family.patterns.size() == 1 && family.patterns[0] == kGpt2Pattern;
  if (family.single_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  if (!own) {
    for (const std::string_view pattern : family.patterns) {
      steps.push_back({{"type", "Split"},
                       {"pattern", {{"Regex", pattern}}},
                       {"behavior", "Isolated"},
                       {"invert", false}});
    }
  }
  steps.push_back(
      {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", own}});
  return steps;
}

ordered_json in_sequence(const ordered_json& steps, const char* members) {
  if (steps.size() == 1) return steps[0];
  return {{"type", "Sequence"}, {members, steps}};
}

json flat(const json& component, const char* members) {
  if (component.is_null()) return json::array();
  return component.value("type", "") == "Sequence" ? component.at(members) : json::array({component});
}

// The same steps, whatever else stands in them: `trim_offsets` changes no token.
bool same_steps(const json& a, const json& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    json left = a[i], right = b[i];
    left.erase("trim_offsets");
    right.erase("trim_offsets");
    if (left.value("type", "") == "ByteLevel" && !left.contains("use_regex")) left["use_regex"] = true;
    if (left != right) return false;
  }
  return true;
}

// The name of the pre-tokeniser that does what this tokenizer.json does.
std::string family_of(const json& tokenizer, const std::string& where) {
  const json steps = flat(tokenizer.value("pre_tokenizer", json()), "pretokenizers");
  const json normalizer = flat(tokenizer.value("normalizer", json()), "normalizers");
  const bool nfc = normalizer.size() == 1 && normalizer[0].value("type", "") == "NFC";
  const bool ignore_merges = tokenizer.at("model").value("ignore_merges", false);
  for (const Family& family : families()) {
    if ((nfc || normalizer.empty()) && family.nfc == nfc && family.ignore_merges == ignore_merges &&
        same_steps(steps, json(steps_of(family))))
      return std::string(family.name);
  }
  throw Error(
      ErrorCode::unsupported,
      fmt::format("{}: GGUF has no name for its pre-tokeniser and normaliser that is known here", where),
      fmt::format("known are {}", known_families()));
}

std::string merge_text(const json& merge) {
  if (merge.is_string()) return merge.get<std::string>();
  return merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>();
}

// Spelling and kind of every id; ids that nothing stands for are padding.
struct Tokens {
  std::vector<std::string> spelling;
  std::vector<std::int32_t> type;
};

Tokens tokens_of(const json& tokenizer, std::int64_t vocabulary, const std::string& where) {
  Tokens tokens;
  const auto size = static_cast<std::size_t>(vocabulary);
  for (std::size_t i = 0; i < size; ++i) tokens.spelling.push_back(fmt::format("[PAD{}]", i));
  tokens.type.assign(size, unused);
  const auto put = [&](const std::string& spelling, const json& id, TokenType type) {
    if (!id.is_number_integer() || id < 0 || id >= vocabulary) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: token '{}' has the id {}; the model has {} tokens", where,
                              weights::printable(spelling), id.dump().substr(0, 40), vocabulary));
    }
    tokens.spelling[id.get<std::size_t>()] = spelling;
    tokens.type[id.get<std::size_t>()] = type;
  };
  for (const auto& [spelling, id] : tokenizer.at("model").at("vocab").items()) put(spelling, id, normal);
  for (const json& added : tokenizer.value("added_tokens", json::array())) {
    for (const char* strips : {"lstrip", "rstrip", "single_word"}) {
      if (added.value(strips, false)) {
        throw Error(ErrorCode::unsupported,
                    fmt::format("{}: GGUF has no word for '{}' of the token '{}'", where, strips,
                                weights::printable(added.at("content").get<std::string>())));
      }
    }
    put(added.at("content").get<std::string>(), added.at("id"),
        added.value("special", false) ? control : user_defined);
  }
  return tokens;
}

ordered_json added_token(std::int64_t id, const std::string& content, bool special, bool normalized) {
  return {{"id", id},        {"content", content},       {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", normalized}, {"special", special}};
}

// Pairs, since a token may hold spaces.
ordered_json in_pairs(const MergeList& merges) {
  ordered_json list = ordered_json::array();
  for (const auto& [left, right] : merges) list.push_back(ordered_json::array({left, right}));
  return list;
}

const ordered_json kSpaces = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kMetaspace}};

// The tokenizer of a GGUF file as tokenizer.json spells its parts: normalizer, pre_tokenizer, decoder, and the model's options and
// merges.
ordered_json byte_level_parts(const weights::GgufFile& file) {
  const Family& family = find_family(std::get<std::string>(file.metadata.at(kPrefix + "pre")));
  ordered_json parts;
  parts["normalizer"] = family.nfc ? ordered_json({{"type", "NFC"}}) : ordered_json();
  parts["pre_tokenizer"] = in_sequence(steps_of(family), "pretokenizers");
  parts["decoder"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  parts["unk_token"] = nullptr;
  parts["ignore_merges"] = family.ignore_merges;
  parts["merges"] = std::get<std::vector<std::string>>(file.metadata.at(kPrefix + "merges"));
  return parts;
}

bool flag_of(const weights::GgufFile& file, const std::string& key, bool absent) {
  const auto found = file.metadata.find(kPrefix + key);
  return found == file.metadata.end() ? absent : std::get<bool>(found->second);
}

ordered_json sentence_piece_parts(const weights::GgufFile& file, const std::vector<std::string>& spellings,
                                  const std::vector<std::int64_t>& types) {
  const bool prefix = flag_of(file, "add_space_prefix", true);
  ordered_json parts;
  const ordered_json prepend = {{"type", "Prepend"}, {"prepend", kMetaspace}};
  parts["normalizer"] = prefix ? in_sequence({prepend, kSpaces}, "normalizers") : kSpaces;
  parts["pre_tokenizer"] = nullptr;
  ordered_json steps = {{{"type", "Replace"}, {"pattern", {{"String", kMetaspace}}}, {"content", " "}},
                        {{"type", "ByteFallback"}},
                        {{"type", "Fuse"}}};
  if (prefix) steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  parts["decoder"] = in_sequence(steps, "decoders");
  const auto unknown = file.metadata.find(kPrefix + "unknown_token_id");
  std::size_t unknown_id = 0;
  if (unknown != file.metadata.end()) {
    const auto* id = std::get_if<std::uint64_t>(&unknown->second);
    unknown_id = id != nullptr ? *id : static_cast<std::size_t>(std::get<std::int64_t>(unknown->second));
  }
  parts["unk_token"] = spellings.at(unknown_id);
  parts["ignore_merges"] = false;
  std::vector<float> scores;
  for (const double score : std::get<std::vector<double>>(file.metadata.at(kPrefix + "scores")))
    scores.push_back(static_cast<float>(score));
  std::vector<bool> take_part;
  for (const std::int64_t type : types) take_part.push_back(type == normal || type == user_defined);
  parts["merges"] = in_pairs(merges_of_scores(spellings, scores, take_part));
  return parts;
}

std::pair<std::string, std::string> parts_of_merge(const json& merge) {
  if (merge.is_array()) return {merge.at(0).get<std::string>(), merge.at(1).get<std::string>()};
  const auto text = merge.get<std::string>();
  const std::size_t space = text.find(' ', 1);
  return {text.substr(0, space), text.substr(space + 1)};
}

void add_sentence_piece(const json& tokenizer, Tokens tokens, const std::string& where,
                        weights::GgufMetadata& metadata) {
  const json normalizer = flat(tokenizer.value("normalizer", json()), "normalizers");
  const json spaces = kSpaces, prepend = {{"type", "Prepend"}, {"prepend", kMetaspace}};
  const bool prefix = normalizer == json::array({prepend, spaces});
  if (!prefix && normalizer != json::array({spaces})) {
    throw Error(
        ErrorCode::unsupported,
        fmt::format("{}: GGUF has no word for the normaliser {}", where, normalizer.dump().substr(0, 200)),
        "known is U+2581 for each space, with another in front or without");
  }
  const json& model = tokenizer.at("model");
  for (std::size_t byte_value = 0; byte_value < 256; ++byte_value) {
    const auto found = model.at("vocab").find(byte_token_name(static_cast<std::uint8_t>(byte_value)));
    if (found != model.at("vocab").end()) tokens.type[found->get<std::size_t>()] = byte;
  }
  if (const json unknown_token = model.value("unk_token", json()); unknown_token.is_string()) {
    const auto id = model.at("vocab").at(unknown_token.get<std::string>()).get<std::uint32_t>();
    tokens.type[id] = unknown;
    metadata.set(kPrefix + "unknown_token_id", id);
  }
  MergeList merges;
  for (const json& merge : model.at("merges")) merges.push_back(parts_of_merge(merge));
  metadata.set(kPrefix + "model", "llama");
  metadata.set(kPrefix + "pre", "default");
  metadata.set(kPrefix + "tokens", tokens.spelling);
  metadata.set(kPrefix + "scores", scores_of_merges(tokens.spelling, merges));
  metadata.set(kPrefix + "token_type", tokens.type);
  metadata.set(kPrefix + "add_space_prefix", prefix);
}

// A BOS in front of every text.
ordered_json template_with(const std::string& bos, std::int32_t id) {
  const ordered_json special = {{"SpecialToken", {{"id", bos}, {"type_id", 0}}}};
  const ordered_json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const ordered_json second = {{"Sequence", {{"id", "B"}, {"type_id", 1}}}};
  ordered_json processor = {
      {"type", "TemplateProcessing"}, {"single", {special, text}}, {"pair", {special, text, second}}};
  processor["special_tokens"][bos] = {{"id", bos}, {"ids", {id}}, {"tokens", {bos}}};
  return processor;
}

std::vector<std::int32_t> stops_of(const Tokenizer& tokenizer) {
  std::vector<std::int32_t> stops;
  for (const std::int32_t id : tokenizer.stops()) {
    if (std::find(stops.begin(), stops.end(), id) == stops.end()) stops.push_back(id);
  }
  return stops;
}

}  // namespace

TokenizerFiles hugging_face_files(const weights::GgufFile& file) {
  const Tokenizer tokenizer = Tokenizer::from_gguf(file);  // checks all that is used below
  const bool byte_level = std::get<std::string>(file.metadata.at(kPrefix + "model")) == "gpt2";
  const auto& spellings = std::get<std::vector<std::string>>(file.metadata.at(kPrefix + "tokens"));
  const auto given = file.metadata.find(kPrefix + "token_type");
  const std::vector<std::int64_t> types = given == file.metadata.end()
                                              ? std::vector<std::int64_t>(spellings.size(), normal)
                                              : std::get<std::vector<std::int64_t>>(given->second);
  const ordered_json parts =
      byte_level ? byte_level_parts(file) : sentence_piece_parts(file, spellings, types);
  // SentencePiece looks for the user's symbols in the text with U+2581; with a prefix they could not be told from it.
  const bool normalized = !byte_level && !flag_of(file, "add_space_prefix", true);

  ordered_json::object_t vocabulary;
  ordered_json added = ordered_json::array();
  vocabulary.reserve(spellings.size());
  for (std::size_t id = 0; id < spellings.size(); ++id) {
    vocabulary.emplace_back(spellings[id], id);  // emplace() would look through all before it
    const std::int64_t type = types[id];
    if (type == control || type == unknown || type == user_defined) {
      const bool special = type != user_defined;
      added.push_back(
          added_token(static_cast<std::int64_t>(id), spellings[id], special, normalized && !special));
    }
  }
  const std::vector<std::int32_t> stops = stops_of(tokenizer);
  const auto spelling = [&](std::int32_t id) { return spellings[static_cast<std::size_t>(id)]; };

  ordered_json definition;
  definition["version"] = "1.0";
  definition["truncation"] = nullptr;
  definition["padding"] = nullptr;
  definition["added_tokens"] = added;
  definition["normalizer"] = parts["normalizer"];
  definition["pre_tokenizer"] = parts["pre_tokenizer"];
  definition["post_processor"] = tokenizer.adds_bos() && tokenizer.bos()
                                     ? template_with(spelling(*tokenizer.bos()), *tokenizer.bos())
                                     : ordered_json();
  definition["decoder"] = parts["decoder"];
  definition["model"] = {{"type", "BPE"},
                         {"dropout", nullptr},
                         {"unk_token", parts["unk_token"]},
                         {"continuing_subword_prefix", nullptr},
                         {"end_of_word_suffix", nullptr},
                         {"fuse_unk", !byte_level},
                         {"byte_fallback", !byte_level},
                         {"ignore_merges", parts["ignore_merges"]}};
  definition["model"]["vocab"] = std::move(vocabulary);
  definition["model"]["merges"] = parts["merges"];

  ordered_json config, generation;
  config["tokenizer_class"] = "PreTrainedTokenizerFast";
  config["clean_up_tokenization_spaces"] = false;
  config["add_bos_token"] = tokenizer.adds_bos();
  if (tokenizer.bos()) {
    config["bos_token"] = spelling(*tokenizer.bos());
    generation["bos_token_id"] = *tokenizer.bos();
  }
  if (!stops.empty()) {
    config["eos_token"] = spelling(stops[0]);
    generation["eos_token_id"] = stops;
  }
  if (const auto chat = file.metadata.find("tokenizer.chat_template");
      chat != file.metadata.end() && std::holds_alternative<std::string>(chat->second))
    config["chat_template"] = std::get<std::string>(chat->second);
  if (generation.is_null()) generation = ordered_json::object();
  try {
    return {definition.dump(1) + "\n", config.dump(2) + "\n", generation.dump(2) + "\n"};
  } catch (const json::type_error&) {
    throw Error(ErrorCode::corrupt, "a token of the GGUF file, or its chat template, is not UTF-8");
  }
}

void add_gguf_tokenizer(const std::filesystem::path& directory, std::int64_t vocabulary,
                        weights::GgufMetadata& metadata) {
  const Tokenizer checked = Tokenizer::from_directory(directory);
  const std::string where = (directory / "tokenizer.json").string();
  const json tokenizer = weights::read_json_object(directory / "tokenizer.json", kMaxTokenizerBytes);
  try {
    const json& model = tokenizer.at("model");
    if (model.value("byte_fallback", false)) {
      add_sentence_piece(tokenizer, tokens_of(tokenizer, vocabulary, where), where, metadata);
    } else {
      const std::string family = family_of(tokenizer, where);
      const Tokens tokens = tokens_of(tokenizer, vocabulary, where);
      std::vector<std::string> merges;
      for (const json& merge : model.at("merges")) merges.push_back(merge_text(merge));
      metadata.set(kPrefix + "model", "gpt2");
      metadata.set(kPrefix + "pre", family);
      metadata.set(kPrefix + "tokens", tokens.spelling);
      metadata.set(kPrefix + "token_type", tokens.type);
      metadata.set(kPrefix + "merges", merges);
    }
  } catch (const json::exception& error) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: {}", where, std::string(error.what()).substr(0, 200)));
  }
  const auto id = [&](const char* key, std::int32_t value) {
    metadata.set(kPrefix + key, static_cast<std::uint32_t>(value));
  };
  if (checked.bos()) id("bos_token_id", *checked.bos());
  const std::vector<std::int32_t> stops = stops_of(checked);
  constexpr const char* kStops[] = {"eos_token_id", "eot_token_id", "eom_token_id"};
  if (stops.size() > std::size(kStops))
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: GGUF names at most {} tokens that end a text, and this has {}", where,
                            std::size(kStops), stops.size()));
  for (std::size_t i = 0; i < stops.size(); ++i) id(kStops[i], stops[i]);
  metadata.set(kPrefix + "add_bos_token", checked.adds_bos());
  if (const std::string chat = read_chat_template(directory); !chat.empty())
    metadata.set("tokenizer.chat_template", chat);
}

}  // namespace basin::text
