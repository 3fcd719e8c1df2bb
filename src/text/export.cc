#include "text/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "text/chat_template.h"
#include "text/families.h"
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
enum TokenType : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5 };

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

ordered_json added_token(std::int64_t id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
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
  const auto& model = std::get<std::string>(file.metadata.at(kPrefix + "model"));
  if (model != "gpt2") {
    throw Error(ErrorCode::unsupported,
                fmt::format("a tokenizer of the model '{}' cannot be written as tokenizer.json", model),
                "byte-level BPE ('gpt2') can; to a .gguf file every tokenizer is copied");
  }
  const auto& spellings = std::get<std::vector<std::string>>(file.metadata.at(kPrefix + "tokens"));
  const auto& merges = std::get<std::vector<std::string>>(file.metadata.at(kPrefix + "merges"));
  const auto types = file.metadata.find(kPrefix + "token_type");
  const Family& family = find_family(std::get<std::string>(file.metadata.at(kPrefix + "pre")));

  ordered_json vocabulary = ordered_json::object(), added = ordered_json::array();
  for (std::size_t id = 0; id < spellings.size(); ++id) {
    vocabulary.emplace(spellings[id], id);
    const std::int64_t type = types == file.metadata.end()
                                  ? std::int64_t{normal}
                                  : std::get<std::vector<std::int64_t>>(types->second)[id];
    if (type == control || type == unknown || type == user_defined)
      added.push_back(added_token(static_cast<std::int64_t>(id), spellings[id], type != user_defined));
  }
  const std::vector<std::int32_t> stops = stops_of(tokenizer);
  const auto spelling = [&](std::int32_t id) { return spellings[static_cast<std::size_t>(id)]; };

  ordered_json definition;
  definition["version"] = "1.0";
  definition["truncation"] = nullptr;
  definition["padding"] = nullptr;
  definition["added_tokens"] = added;
  definition["normalizer"] = family.nfc ? ordered_json({{"type", "NFC"}}) : ordered_json();
  definition["pre_tokenizer"] = in_sequence(steps_of(family), "pretokenizers");
  definition["post_processor"] = tokenizer.adds_bos() && tokenizer.bos()
                                     ? template_with(spelling(*tokenizer.bos()), *tokenizer.bos())
                                     : ordered_json();
  definition["decoder"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  definition["model"] = {{"type", "BPE"},
                         {"dropout", nullptr},
                         {"unk_token", nullptr},
                         {"continuing_subword_prefix", nullptr},
                         {"end_of_word_suffix", nullptr},
                         {"fuse_unk", false},
                         {"byte_fallback", false},
                         {"ignore_merges", family.ignore_merges},
                         {"vocab", std::move(vocabulary)},
                         {"merges", merges}};

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
    if (tokenizer.at("model").value("type", "BPE") != "BPE" ||
        tokenizer.at("model").value("byte_fallback", false)) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: only byte-level BPE can be written to GGUF", where),
                  "a GGUF file of the model has its tokenizer already; convert that");
    }
    const std::string family = family_of(tokenizer, where);
    const Tokens tokens = tokens_of(tokenizer, vocabulary, where);
    std::vector<std::string> merges;
    for (const json& merge : tokenizer.at("model").at("merges")) merges.push_back(merge_text(merge));
    metadata.set(kPrefix + "model", "gpt2");
    metadata.set(kPrefix + "pre", family);
    metadata.set(kPrefix + "tokens", tokens.spelling);
    metadata.set(kPrefix + "token_type", tokens.type);
    metadata.set(kPrefix + "merges", merges);
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
