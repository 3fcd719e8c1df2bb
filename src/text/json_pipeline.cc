#include "text/json_pipeline.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "basin/base/error.h"

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

Pattern read_pattern(const json& pattern) {
  if (pattern.contains("Regex")) return Pattern(pattern.at("Regex").get<std::string>());
  const auto literal = pattern.at("String").get<std::string>();
  if (literal.empty()) refuse("pre-tokeniser", "Split by an empty string");
  return Pattern::literal(literal);
}

}  // namespace

bool reads_nfc(const json& normalizer) {
  bool nfc = false;
  for (const json& step : flatten(normalizer, "normalizers")) {
    if (type_of(step) != "NFC") refuse("normaliser", type_of(step));
    nfc = true;
  }
  return nfc;
}

PreTokenizer read_pre_tokenizer(const json& pre_tokenizer) {
  std::vector<SplitStep> steps;
  bool byte_level = false, final_prefix_space = false;
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
    } else {
      refuse("pre-tokeniser", type);
    }
  }
  if (!byte_level) refuse("pre-tokeniser", "without ByteLevel");
  return PreTokenizer(std::move(steps), final_prefix_space);
}

void check_decoder(const json& decoder) {
  for (const json& step : flatten(decoder, "decoders")) {
    if (type_of(step) != "ByteLevel") refuse("decoder", type_of(step));
  }
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
