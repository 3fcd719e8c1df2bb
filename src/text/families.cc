#include "text/families.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "basin/base/error.h"

namespace basin::text {

const std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

// The patterns as the models' own tokenizer.json have them.
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// DeepSeek's come in several steps; each splits what the one before has left.
constexpr std::array<std::string_view, 6> kDeepseekLlm = {
    R"([\r\n])",
    R"(\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af})"
    R"(\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1})"
    R"(\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5})"
    R"(\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77})"
    R"(\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d})"
    R"(\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe})"
    R"(\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec})"
    R"(\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124})"
    R"(\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e})"
    R"(\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d})"
    R"(\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf})"
    R"(\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f})"
    R"(\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df})"
    R"(\x{1e900}-\x{1e943})"
    R"(]+)",
    R"(\s?[!-/:-~！-／：-～‘-‟　-。]+)",
    R"(\s+$)",
    R"([一-龥ࠀ-一가-퟿]+)",
    R"(\p{N}+)"};
constexpr std::array<std::string_view, 5> kDeepseekCoder = {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)",
                                                            R"([一-龥ࠀ-一가-퟿]+)", R"(\p{N})"};
constexpr std::array<std::string_view, 3> kDeepseekV3 = {
    R"(\p{N}{1,3})", R"([一-龥぀-ゟ゠-ヿ]+)",
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};

constexpr std::span<const std::string_view> one(const std::string_view& pattern) {
  return {&pattern, 1};
}

const std::array<Family, 12>& all_families() {
  static const std::array<Family, 12> all = {{
      {.name = "gpt-2", .patterns = one(kGpt2Pattern)},
      {.name = "smollm", .patterns = one(kGpt2Pattern), .single_digits = true},
      {.name = "qwen2", .patterns = one(kQwen2), .nfc = true},
      {.name = "deepseek-r1-qwen", .patterns = one(kQwen2), .nfc = true},
      {.name = "llama-bpe", .patterns = one(kLlama3), .ignore_merges = true, .adds_bos = true},
      {.name = "llama3", .patterns = one(kLlama3), .ignore_merges = true, .adds_bos = true},
      {.name = "llama-v3", .patterns = one(kLlama3), .ignore_merges = true, .adds_bos = true},
      {.name = "gpt-4o", .patterns = one(kO200k)},
      {.name = "llama4", .patterns = one(kO200k)},
      {.name = "deepseek-llm", .patterns = kDeepseekLlm},
      {.name = "deepseek-coder", .patterns = kDeepseekCoder},
      {.name = "deepseek-v3", .patterns = kDeepseekV3},
  }};
  return all;
}

}  // namespace

std::span<const Family> families() {
  return all_families();
}

std::string known_families() {
  std::string names;
  for (const Family& family : families()) names += (names.empty() ? "" : ", ") + std::string(family.name);
  return names;
}

const Family& find_family(std::string_view name) {
  const auto all = families();
  const auto family = std::find_if(all.begin(), all.end(), [&](const Family& f) { return f.name == name; });
  if (family == all.end()) {
    throw Error(
        ErrorCode::unsupported, fmt::format("pre-tokeniser '{}' (tokenizer.ggml.pre) is not known", name),
        fmt::format("known are {}; or use the model's directory with tokenizer.json", known_families()));
  }
  return *family;
}

void set_family(std::string_view name, Definition& definition) {
  const Family& family = find_family(name);
  std::vector<SplitStep> steps;
  if (family.single_digits) steps.push_back({Pattern::digits(true)});
  for (const std::string_view pattern : family.patterns) steps.push_back({Pattern(pattern)});
  definition.pre_tokenizer = PreTokenizer(std::move(steps));
  if (family.nfc) definition.normalizer = Normalizer(std::vector<NormalizerStep>{{NormalizerStep::nfc}});
  definition.bpe.ignore_merges = family.ignore_merges;
  definition.adds_bos = family.adds_bos;
}

}  // namespace basin::text
