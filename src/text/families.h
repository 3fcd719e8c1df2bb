// The pre-tokenisers that GGUF files name.
#pragma once

#include <string_view>

#include "text/state.h"

namespace basin::text {

/// What ByteLevel of a tokenizer.json splits by.
extern const std::string_view kGpt2Pattern;

/// Fills in what a value of tokenizer.ggml.pre stands for. Throws Error(unsupported) that lists the known ones.
void set_family(std::string_view name, Definition& definition);

}  // namespace basin::text
