// Damaged and unknown tokenizers: one clear error each.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "text/pattern.h"
#include "text/tokenizer.h"
#include "weights/gguf.h"

namespace basin::text {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class Directory {
 public:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "basin-text-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  void write(const char* file, const std::string& text) const { std::ofstream(path_ / file) << text; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

json tiny() {
  std::ifstream in(BASIN_SOURCE_DIR "/tests/text/tiny/tokenizer.json");
  return json::parse(in);
}

void expect_error(const std::function<void()>& action, ErrorCode code, const std::string& message) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown; expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

void expect_refused(const std::function<void(json&)>& change, ErrorCode code, const std::string& message) {
  json document = tiny();
  change(document);
  const Directory directory;
  directory.write("tokenizer.json", document.dump());
  const auto load = [&] { Tokenizer::from_directory(directory.path()); };
  expect_error(load, code, message);
  expect_error(load, code, directory.path().string());
}

TEST(HostileTokenizer, MissingAndBrokenFiles) {
  const Directory directory;
  const auto load = [&] { Tokenizer::from_directory(directory.path()); };
  expect_error(load, ErrorCode::not_found, "tokenizer.json");
  for (const char* text : {"", "{", "[]", "null", "\xff\xfe", "{\"model\": \"\xff\"}"}) {
    directory.write("tokenizer.json", text);
    expect_error(load, ErrorCode::corrupt, "JSON");
  }
  directory.write("tokenizer.json", std::string(100'000, '['));
  expect_error(load, ErrorCode::corrupt, "JSON");
  directory.write("tokenizer.json", tiny().dump());
  for (const char* file : {"tokenizer_config.json", "generation_config.json"}) {
    directory.write(file, "{");
    expect_error(load, ErrorCode::corrupt, file);
    directory.write(file, "{}");
  }
  directory.write("generation_config.json", R"({"eos_token_id": [2, 288]})");
  expect_error(load, ErrorCode::corrupt, "288");
  directory.write("generation_config.json", R"({"eos_token_id": 5})");
  directory.write("tokenizer_config.json", R"({"add_bos_token": true})");
  expect_error(load, ErrorCode::corrupt, "BOS");
  directory.write("tokenizer_config.json", R"({"bos_token": "nothing"})");
  expect_error(load, ErrorCode::corrupt, "'nothing'");
  directory.write("tokenizer_config.json",
                  R"({"add_bos_token": true, "bos_token": {"content": "<|endoftext|>"}})");
  const Tokenizer tokenizer = Tokenizer::from_directory(directory.path());
  EXPECT_TRUE(tokenizer.adds_bos());
  EXPECT_EQ(tokenizer.bos(), 0);
  EXPECT_THAT(tokenizer.stops(), testing::ElementsAre(0, 2, 5));
}

TEST(HostileTokenizer, AKeyThatStandsTwice) {
  const Directory directory;
  const auto load = [&] { Tokenizer::from_directory(directory.path()); };
  const std::string text = tiny().dump();
  const auto doubled = [&](const std::string& after, const std::string& entry) {
    std::string changed = text;
    return changed.insert(text.find(after) + after.size(), entry);
  };
  directory.write("tokenizer.json", doubled(R"("vocab":{)", R"("\u0061":7,)"));
  expect_error(load, ErrorCode::corrupt, "'a' twice, in 'model.vocab'");
  directory.write("tokenizer.json", doubled("{", R"("model":{},)"));
  expect_error(load, ErrorCode::corrupt, "'model' twice");
  directory.write("tokenizer.json", text);
  for (const char* file : {"tokenizer_config.json", "generation_config.json"}) {
    directory.write(file, R"({"eos_token_id": 1, "eos_token_id": 2})");
    expect_error(load, ErrorCode::corrupt, "'eos_token_id' twice");
    directory.write(file, "{}");
  }
}

TEST(HostileTokenizer, MissingFields) {
  for (const char* key : {"vocab", "merges"}) {
    expect_refused([&](json& d) { d["model"].erase(key); }, ErrorCode::corrupt, key);
  }
  expect_refused([](json& d) { d.erase("model"); }, ErrorCode::corrupt, "model");
  expect_refused([](json& d) { d["added_tokens"][0].erase("id"); }, ErrorCode::corrupt, "id");
  expect_refused([](json& d) { d["added_tokens"][0].erase("content"); }, ErrorCode::corrupt, "content");
  expect_refused([](json& d) { d["pre_tokenizer"].erase("pretokenizers"); }, ErrorCode::corrupt,
                 "pretokenizers");
  expect_refused(
      [](json& d) {
        d["pre_tokenizer"] = json{{"type", "Split"}};
      },
      ErrorCode::corrupt, "pattern");
}

TEST(HostileTokenizer, WrongTypesEverywhere) {
  // Every member in turn becomes a value of every kind: an Error or a tokenizer, never anything else.
  const json original = tiny();
  const std::vector<json> values = {nullptr,          true, -1, 1e300, "x", json::array({1, nullptr}),
                                    json{{"type", 3}}};
  const Directory directory;
  const json flat = original.flatten();
  for (const auto& [pointer, old] : flat.items()) {
    if (pointer.starts_with("/model/vocab/") && !pointer.ends_with("0")) continue;  // one of many alike
    if (pointer.starts_with("/model/merges/") && !pointer.starts_with("/model/merges/1/")) continue;
    for (const json& value : values) {
      json document = original;
      document[json::json_pointer(pointer)] = value;
      directory.write("tokenizer.json", document.dump());
      try {
        Tokenizer::from_directory(directory.path()).encode("the cat <tool> 12", true);
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::unsupported)
            << pointer << ": " << error.what();
      }
    }
  }
}

TEST(HostileTokenizer, ContradictoryVocabulary) {
  expect_refused([](json& d) { d["model"]["vocab"] = json::object(); }, ErrorCode::corrupt, "");
  expect_refused([](json& d) { d["model"]["vocab"]["zzz"] = 5; }, ErrorCode::corrupt,
                 "id 5 is given to two tokens");
  expect_refused([](json& d) { d["model"]["vocab"]["zzz"] = -5; }, ErrorCode::corrupt, "-5");
  expect_refused([](json& d) { d["model"]["vocab"]["zzz"] = 2'000'000'000; }, ErrorCode::corrupt,
                 "2000000000");
  expect_refused([](json& d) { d["model"]["vocab"]["zzz"] = 18446744073709551615u; }, ErrorCode::corrupt,
                 "zzz");
  expect_refused([](json& d) { d["added_tokens"][0]["id"] = 7; }, ErrorCode::corrupt, "<|endoftext|>");
  expect_refused([](json& d) { d["added_tokens"][3]["id"] = 7; }, ErrorCode::corrupt, "<tool>");
  expect_refused([](json& d) { d["added_tokens"][3]["content"] = ""; }, ErrorCode::corrupt, "empty");
}

TEST(HostileTokenizer, ContradictoryMerges) {
  const auto merges = [](json value) { return [value](json& d) { d["model"]["merges"] = value; }; };
  expect_refused(merges({json{"t", "h", "e"}}), ErrorCode::corrupt, "two parts");
  expect_refused(merges({"t h e"}), ErrorCode::corrupt, "two parts");
  expect_refused(merges({"the"}), ErrorCode::corrupt, "two parts");
  expect_refused(merges({"t unknown"}), ErrorCode::corrupt, "'unknown'");
  expect_refused(merges({"q x"}), ErrorCode::corrupt, "'qx'");
  expect_refused(merges({"h e", "h e"}), ErrorCode::corrupt, "twice");
  // The result of a merge cannot be a part of itself, as lengths add up; a cycle of names ends as unknown results.
  expect_refused(merges({"h e", "he he"}), ErrorCode::corrupt, "'hehe'");
}

TEST(HostileTokenizer, NoMergeLeadsToASpecialToken) {
  json document = tiny();
  document["model"]["vocab"]["<|"] = 290;
  document["added_tokens"][0]["content"] = "<|";
  document["added_tokens"][0]["id"] = 290;
  document["model"]["merges"] = {"< |"};
  const Directory directory;
  directory.write("tokenizer.json", document.dump());
  const Tokenizer tokenizer = Tokenizer::from_directory(directory.path());
  EXPECT_THAT(tokenizer.encode("<|", true), testing::ElementsAre(290));
  EXPECT_THAT(tokenizer.encode("<|", false), testing::ElementsAre(30, 94));
}

TEST(HostileTokenizer, OneLongWordThatMergesEverywhere) {
  json document = tiny();
  document["pre_tokenizer"]["pretokenizers"].erase(0);
  document["model"]["merges"] = json::array();
  std::string run = "a";
  int id = 300;
  for (int doubling = 0; doubling < 8; ++doubling) {
    document["model"]["merges"].push_back(run + " " + run);
    run += run;
    document["model"]["vocab"][run] = id++;
  }
  const Directory directory;
  directory.write("tokenizer.json", document.dump());
  const Tokenizer tokenizer = Tokenizer::from_directory(directory.path());
  const auto ids = tokenizer.encode(std::string((1 << 20) + 3, 'a'), true);
  ASSERT_EQ(ids.size(), 4096u + 2u);
  EXPECT_EQ(ids[0], 307);
  EXPECT_EQ(ids[4096], 300);  // 3 = 2 + 1
  EXPECT_EQ(tokenizer.token_bytes(ids[4097], true), "a");
}

TEST(HostileTokenizer, UnknownComponentsAreNamed) {
  const auto set = [](const char* key, json value) { return [=](json& d) { d[key] = value; }; };
  const auto type = [](const char* name) { return json{{"type", name}}; };
  const auto with = [&](const char* name, json members) {
    members["type"] = name;
    return members;
  };
  const auto refused = [](const std::function<void(json&)>& change, const char* name) {
    expect_refused(change, ErrorCode::unsupported, name);
  };
  refused(set("normalizer", type("Lowercase")), "Lowercase");
  refused(set("normalizer", json{{"type", "Sequence"}, {"normalizers", {type("NFC"), type("NFKC")}}}),
          "NFKC");
  refused(set("pre_tokenizer", json{{"type", "Metaspace"}, {"replacement", "_"}}), "Metaspace of '_'");
  refused(set("pre_tokenizer",
              json{{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "sometimes"}}),
          "sometimes");
  refused(set("normalizer", json{{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", "x"}}),
          "regular expression");
  refused(set("normalizer", json{{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "x"}}),
          "empty string");
  refused(set("decoder", with("Replace", {{"pattern", {{"String", "_"}}}, {"content", " "}})), "U+2581");
  refused(set("decoder", with("Strip", {{"content", " "}, {"start", 2}, {"stop", 0}})), "Strip");
  refused(set("decoder", type("ByteFallback")), "ByteLevel in only one");
  refused(set("pre_tokenizer", nullptr), "ByteLevel");
  refused(set("pre_tokenizer", json{{"type", "Digits"}, {"individual_digits", true}}), "ByteLevel");
  refused(set("decoder", type("WordPiece")), "WordPiece");
  refused(set("post_processor", type("BertProcessing")), "BertProcessing");
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json end = {{"SpecialToken", {{"id", "<|im_end|>"}, {"type_id", 0}}}};
  refused(set("post_processor", json{{"type", "TemplateProcessing"}, {"single", {text, end}}}),
          "TemplateProcessing");
  refused([](json& d) { d["model"]["type"] = "Unigram"; }, "Unigram");
  refused([](json& d) { d["model"]["dropout"] = 0.1; }, "dropout");
  refused([](json& d) { d["model"]["byte_fallback"] = true; }, "byte_fallback in only one");
  refused([](json& d) { d["model"]["end_of_word_suffix"] = "</w>"; }, "end_of_word_suffix");
  refused([](json& d) { d["model"]["continuing_subword_prefix"] = "##"; }, "continuing_subword_prefix");
  refused([](json& d) { d["added_tokens"][3]["single_word"] = true; }, "single_word");
  refused([](json& d) { d["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Shuffled"; }, "Shuffled");
}

TEST(HostileTokenizer, PatternsThatCouldMeanSomethingElse) {
  for (const char* pattern :
       {"\\w+", "\\bword", "^a", "[a[bc]]", "[a&&b]", "(?i)a", "a{2}+", "[\\S]", "(a)\\1", "(?<name>a)",
        "(*ACCEPT)", "\\", "\\p", "\\pL", "[]a]", "\\X", "\\K"}) {
    expect_error([&] { Pattern{pattern}; }, ErrorCode::unsupported, "not supported");
  }
  for (const char* pattern : {"(a", "[a", "a{2,1}", "\\p{Nonsense}", "*a"}) {
    expect_error([&] { Pattern{pattern}; }, ErrorCode::corrupt, "regular expression");
  }
}

TEST(HostileTokenizer, ExponentialPatternEnds) {
  const Pattern pattern("(?:a+)+[bc]");
  expect_error([&] { pattern.find(std::string(200, 'a')); }, ErrorCode::unsupported, "fails at byte 0");
}

weights::GgufFile gguf() {
  weights::GgufFile file;
  file.metadata["tokenizer.ggml.model"] = std::string("gpt2");
  file.metadata["tokenizer.ggml.pre"] = std::string("smollm");
  file.metadata["tokenizer.ggml.tokens"] =
      std::vector<std::string>{"<|im_end|>", "a", "b", "ab", "1", "Ġ", "Ġab"};
  file.metadata["tokenizer.ggml.token_type"] = std::vector<std::int64_t>{3, 1, 1, 1, 1, 1, 1};
  file.metadata["tokenizer.ggml.merges"] = std::vector<std::string>{"a b", "Ġ ab"};
  file.metadata["tokenizer.ggml.eos_token_id"] = std::uint64_t{0};
  return file;
}

TEST(GgufTokenizer, Reads) {
  const Tokenizer tokenizer = Tokenizer::from_gguf(gguf());
  EXPECT_THAT(tokenizer.encode("ab ab11<|im_end|>", true), testing::ElementsAre(3, 6, 4, 4, 0));
  EXPECT_THAT(tokenizer.stops(), testing::ElementsAre(0));
  EXPECT_FALSE(tokenizer.adds_bos());
}

TEST(GgufTokenizer, Refuses) {
  const auto refused = [](const char* key, const weights::GgufValue& value, ErrorCode code,
                          const char* message) {
    weights::GgufFile file = gguf();
    file.metadata[key] = value;
    expect_error([&] { Tokenizer::from_gguf(file); }, code, message);
  };
  using Strings = std::vector<std::string>;
  using Integers = std::vector<std::int64_t>;
  refused("tokenizer.ggml.model", std::string("bert"), ErrorCode::unsupported, "'bert'");
  refused("tokenizer.ggml.pre", std::string("mystery"), ErrorCode::unsupported, "'mystery'");
  refused("tokenizer.ggml.pre", true, ErrorCode::corrupt, "tokenizer.ggml.pre");
  refused("tokenizer.ggml.tokens", Strings{"a", "a"}, ErrorCode::corrupt, "token types");
  refused("tokenizer.ggml.tokens", Strings{"a", "a", "b", "c", "d", "e", "f"}, ErrorCode::corrupt,
          "appears twice");
  refused("tokenizer.ggml.token_type", Integers{9, 1, 1, 1, 1, 1, 1}, ErrorCode::corrupt, "unknown type 9");
  refused("tokenizer.ggml.merges", Strings{"ab"}, ErrorCode::corrupt, "two parts");
  refused("tokenizer.ggml.merges", Strings{"a zz"}, ErrorCode::corrupt, "'zz'");
  refused("tokenizer.ggml.eos_token_id", std::uint64_t{7}, ErrorCode::corrupt, "7");
  refused("tokenizer.ggml.bos_token_id", std::int64_t{-1}, ErrorCode::corrupt, "bos_token_id");
  refused("tokenizer.ggml.add_bos_token", true, ErrorCode::corrupt, "BOS");
  refused("tokenizer.ggml.add_eos_token", true, ErrorCode::unsupported, "add_eos_token");
  for (const char* key : {"model", "pre", "tokens", "merges"}) {
    weights::GgufFile file = gguf();
    file.metadata.erase(std::string("tokenizer.ggml.") + key);
    expect_error([&] { Tokenizer::from_gguf(file); }, ErrorCode::corrupt, key);
  }
}

TEST(GgufTokenizer, AnUnknownFamilyIsRefusedWithTheKnownOnes) {
  weights::GgufFile file = gguf();
  file.metadata["tokenizer.ggml.pre"] = std::string("mystery");
  try {
    Tokenizer::from_gguf(file);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.hint(), HasSubstr("llama-bpe"));
    EXPECT_THAT(error.hint(), HasSubstr("deepseek-v3"));
  }
}

// Text becomes pieces of characters, those without a token become bytes, and what is named in a text stays text.
weights::GgufFile sentence_piece() {
  weights::GgufFile file;
  file.metadata["tokenizer.ggml.model"] = std::string("llama");
  std::vector<std::string> tokens = {"<unk>",  "<s>",     "</s>", "a",   "b",       "ab",
                                     "\u2581", "\u2581a", "ba",   "[x]", "\u2581ab"};
  std::vector<std::int64_t> types = {2, 3, 3, 1, 1, 1, 1, 1, 1, 4, 5};
  std::vector<double> scores = {0, 0, 0, -9, -9, -2, -9, -3, -1, 0, 9};
  for (int byte = 0; byte < 256; ++byte) {
    tokens.push_back(fmt::format("<0x{:02X}>", byte));
    types.push_back(6);
    scores.push_back(0);
  }
  file.metadata["tokenizer.ggml.tokens"] = tokens;
  file.metadata["tokenizer.ggml.token_type"] = types;
  file.metadata["tokenizer.ggml.scores"] = scores;
  file.metadata["tokenizer.ggml.eos_token_id"] = std::uint64_t{2};
  return file;
}

constexpr std::int32_t kByte0 = 11;

TEST(SentencePieceTokenizer, Encodes) {
  using testing::ElementsAre;
  weights::GgufFile file = sentence_piece();
  const Tokenizer prefixed = Tokenizer::from_gguf(file);
  EXPECT_TRUE(prefixed.adds_bos());
  EXPECT_EQ(prefixed.bos(), 1);
  EXPECT_THAT(prefixed.stops(), ElementsAre(2));
  EXPECT_THAT(prefixed.encode("ab", true), ElementsAre(6, 5));  // the unused token has the best score
  EXPECT_THAT(prefixed.encode("</s>a", true), ElementsAre(2, 7));
  EXPECT_EQ(prefixed.decode(prefixed.encode("ab \u00e9[x] ", false), false), "ab \u00e9[x]  ");

  file.metadata["tokenizer.ggml.add_space_prefix"] = false;
  const Tokenizer tokenizer = Tokenizer::from_gguf(file);
  EXPECT_THAT(tokenizer.encode("aba", false), ElementsAre(3, 8));  // ba before ab by its score
  EXPECT_THAT(tokenizer.encode("abab", false), ElementsAre(3, 8, 4));
  EXPECT_THAT(tokenizer.encode(" a[x]\u00e9", false), ElementsAre(7, 9, kByte0 + 0xc3, kByte0 + 0xa9));
  EXPECT_EQ(tokenizer.token_bytes(kByte0 + 0xc3, false), "\xc3");
  EXPECT_EQ(tokenizer.token_bytes(7, false), " a");
  const auto named = tokenizer.encode("<s><0x41>", false);
  EXPECT_EQ(std::count(named.begin(), named.end(), 1), 0);
  EXPECT_EQ(tokenizer.decode(named, false), "<s><0x41>");
}

TEST(SentencePieceTokenizer, CharactersWithoutBytesAreUnknown) {
  weights::GgufFile file = sentence_piece();
  auto& types = std::get<std::vector<std::int64_t>>(file.metadata["tokenizer.ggml.token_type"]);
  types[kByte0 + 0xa9] = 1;
  file.metadata["tokenizer.ggml.add_space_prefix"] = false;
  const Tokenizer tokenizer = Tokenizer::from_gguf(file);
  EXPECT_THAT(tokenizer.encode("a\u00e9\u00e9b\u00e9", false), testing::ElementsAre(3, 0, 4, 0));
}

TEST(SentencePieceTokenizer, Refuses) {
  const auto refused = [](const char* key, const weights::GgufValue& value, ErrorCode code,
                          const char* message) {
    weights::GgufFile file = sentence_piece();
    file.metadata[key] = value;
    expect_error([&] { Tokenizer::from_gguf(file); }, code, message);
  };
  refused("tokenizer.ggml.scores", std::vector<double>{1, 2}, ErrorCode::corrupt, "2 scores for 267 tokens");
  refused("tokenizer.ggml.scores", std::vector<double>(267, std::nan("")), ErrorCode::corrupt, "score nan");
  refused("tokenizer.ggml.unknown_token_id", std::uint64_t{267}, ErrorCode::corrupt, "267");
  refused("tokenizer.ggml.remove_extra_whitespaces", true, ErrorCode::unsupported, "remove_extra");
  std::vector<std::int64_t> types(267, 1);
  types[3] = 6;
  refused("tokenizer.ggml.token_type", types, ErrorCode::corrupt, "'a' names no byte");
  weights::GgufFile file = sentence_piece();
  file.metadata.erase("tokenizer.ggml.scores");
  expect_error([&] { Tokenizer::from_gguf(file); }, ErrorCode::corrupt, "scores");
}

}  // namespace
}  // namespace basin::text
