// The parts of tokenizer.json other than vocabulary and merges.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "text/state.h"

namespace basin::text {

/// Each throws Error(unsupported) naming a component or option that is not known.
bool reads_nfc(const nlohmann::json& normalizer);
PreTokenizer read_pre_tokenizer(const nlohmann::json& pre_tokenizer);
void check_decoder(const nlohmann::json& decoder);

/// The token that the post-processor puts before a text, if any.
std::optional<std::string> read_post_processor(const nlohmann::json& post_processor);

}  // namespace basin::text
