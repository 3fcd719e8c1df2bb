// The pre-tokenisers that GGUF files name.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "text/state.h"

namespace basin::text {

/// What ByteLevel of a tokenizer.json splits by.
extern const std::string_view kGpt2Pattern;

struct Family {
  std::string_view name;
  std::span<const std::string_view> patterns;  // in order
  bool single_digits = false;                  // digits stand alone, before the patterns are applied
  bool nfc = false;
  bool ignore_merges = false;
  bool adds_bos = false;
};

/// All that are known, those with several names by each.
std::span<const Family> families();
std::string known_families();  // "gpt-2, smollm, ..."

/// Throws Error(unsupported) that lists the known ones.
const Family& find_family(std::string_view name);

/// Fills in what a value of tokenizer.ggml.pre stands for. Throws Error(unsupported) that lists the known ones.
void set_family(std::string_view name, Definition& definition);

}  // namespace basin::text
