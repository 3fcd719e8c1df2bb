#include "text/json_pipeline.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "text/families.h"

namespace basin::text {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(std::string_view part, std::string_view what) {
  throw Error(ErrorCode::unsupported, fmt::format("tokenizer.json: {} '{}' is not supported", part, what));
}

std::string type_of(const json& component) {
  return component.at("type").get<std::string>();
}

/// The members of a Sequence, or the component itself.
std::vector<json> flatten(const json& component, const char* members) {
  if (component.is_null()) return {};
  if (type_of(component) != "Sequence") return {component};
  std::vector<json> flat;
  for (const json& member : component.at(members)) {
    if (member.is_object() && member.value("type", "") == "Sequence") refuse("nested", "Sequence");
    flat.push_back(member);
  }
  return flat;
}

SplitBehaviour read_behaviour(const std::string& name) {
  if (name == "Isolated") return SplitBehaviour::isolated;
  if (name == "Removed") return SplitBehaviour::removed;
  if (name == "MergedWithPrevious") return SplitBehaviour::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehaviour::merged_with_next;
  if (name == "Contiguous") return SplitBehaviour::contiguous;
  refuse("split behaviour", name);
}

/// The text, not empty, that a Replace looks for.
std::string literal_of(std::string_view part, const json& replace) {
  const json& pattern = replace.at("pattern");
  if (!pattern.contains("String")) refuse(part, "Replace of a regular expression");
  auto literal = pattern.at("String").get<std::string>();
  if (literal.empty()) refuse(part, "Replace of an empty string");
  return literal;
}

void check_metaspace(std::string_view part, const json& step) {
  const auto replacement = step.at("replacement").get<std::string>();
  if (replacement != kMetaspace) refuse(part, fmt::format("Metaspace of '{}'", replacement));
}

/// Older files have a flag instead of the scheme.
Metaspace read_prefix(const json& step) {
  const bool always = step.value("add_prefix_space", true);
  const auto scheme = step.value("prepend_scheme", std::string(always ? "always" : "never"));
  if (scheme == "always") return Metaspace::prefix_always;
  if (scheme == "first") return Metaspace::prefix_first;
  if (scheme == "never") return Metaspace::prefix_never;
  refuse("pre-tokeniser", fmt::format("Metaspace with prepend_scheme '{}'", scheme));
}

Pattern read_pattern(const json& pattern) {
  if (pattern.contains("Regex")) return Pattern(pattern.at("Regex").get<std::string>());
  const auto literal = pattern.at("String").get<std::string>();
  if (literal.empty()) refuse("pre-tokeniser", "Split by an empty string");
  return Pattern::literal(literal);
}

}  // namespace

Normalizer read_normalizer(const json& normalizer) {
  std::vector<NormalizerStep> steps;
  for (const json& step : flatten(normalizer, "normalizers")) {
    const std::string type = type_of(step);
    if (type == "NFC") {
      steps.push_back({NormalizerStep::nfc});
    } else if (type == "Prepend") {
      steps.push_back({NormalizerStep::prepend, {}, step.at("prepend").get<std::string>()});
    } else if (type == "Replace") {
      steps.push_back(
          {NormalizerStep::replace, literal_of("normaliser", step), step.at("content").get<std::string>()});
    } else {
      refuse("normaliser", type);
    }
  }
  return Normalizer(std::move(steps));
}

Cutting read_pre_tokenizer(const json& pre_tokenizer) {
  std::vector<SplitStep> steps;
  bool byte_level = false, final_prefix_space = false;
  Metaspace metaspace = Metaspace::none;
  for (const json& step : flatten(pre_tokenizer, "pretokenizers")) {
    const std::string type = type_of(step);
    if (byte_level) refuse("pre-tokeniser after ByteLevel", type);
    if (type == "Split") {
      steps.push_back({read_pattern(step.at("pattern")),
                       read_behaviour(step.at("behavior").get<std::string>()),
                       step.at("invert").get<bool>()});
    } else if (type == "Digits") {
      const bool individual = step.at("individual_digits").get<bool>();
      steps.push_back({Pattern::digits(individual)});
    } else if (type == "ByteLevel") {
      byte_level = true;
      const bool prefix_space = step.at("add_prefix_space").get<bool>();
      if (step.value("use_regex", true)) {
        steps.push_back({Pattern(kGpt2Pattern), SplitBehaviour::isolated, false, prefix_space});
      } else {
        final_prefix_space = prefix_space;
      }
    } else if (type == "Metaspace") {
      if (!steps.empty() || metaspace != Metaspace::none) refuse("pre-tokeniser before Metaspace", "another");
      check_metaspace("pre-tokeniser", step);
      metaspace = read_prefix(step);
      if (step.value("split", true))
        steps.push_back({Pattern::literal(kMetaspace), SplitBehaviour::merged_with_next});
    } else {
      refuse("pre-tokeniser", type);
    }
  }
  return {PreTokenizer(std::move(steps), final_prefix_space, metaspace), byte_level};
}

Decoding read_decoder(const json& decoder) {
  Decoding decoding;
  for (const json& step : flatten(decoder, "decoders")) {
    const std::string type = type_of(step);
    if (type == "ByteLevel") {
      decoding.byte_level = true;
    } else if (type == "Metaspace") {
      check_metaspace("decoder", step);
      decoding.metaspace = true;
      decoding.strips_first_space = read_prefix(step) != Metaspace::prefix_never;
    } else if (type == "Replace") {
      const auto to = step.at("content").get<std::string>();
      if (literal_of("decoder", step) != kMetaspace || to != " ")
        refuse("decoder", "Replace of anything but U+2581 by a space");
      decoding.metaspace = true;
    } else if (type == "ByteFallback") {
      decoding.byte_tokens = true;
    } else if (type == "Strip") {
      if (step.at("content").get<std::string>() != " " || step.at("start").get<int>() > 1 ||
          step.at("stop").get<int>() != 0)
        refuse("decoder", "Strip of anything but one space at the start");
      decoding.strips_first_space = step.at("start").get<int>() == 1;
    } else if (type != "Fuse") {  // which joins what is joined here anyway
      refuse("decoder", type);
    }
  }
  if (decoding.byte_level && (decoding.metaspace || decoding.byte_tokens))
    refuse("decoder", "ByteLevel together with others");
  return decoding;
}

std::optional<std::string> read_post_processor(const json& post_processor) {
  std::optional<std::string> first;
  for (const json& step : flatten(post_processor, "processors")) {
    const std::string type = type_of(step);
    if (type == "ByteLevel") continue;  // changes offsets only
    if (type != "TemplateProcessing") refuse("post-processor", type);
    bool seen_text = false;
    for (const json& part : step.at("single")) {
      if (part.contains("Sequence")) {
        if (seen_text) refuse("post-processor", "TemplateProcessing that repeats the text");
        seen_text = true;
      } else if (seen_text || first) {
        refuse("post-processor", "TemplateProcessing with more than one token before the text");
      } else {
        first = part.at("SpecialToken").at("id").get<std::string>();
      }
    }
  }
  return first;
}

}  // namespace basin::text
