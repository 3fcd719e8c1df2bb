// The parts of tokenizer.json other than vocabulary and merges.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "text/state.h"

namespace basin::text {

struct Decoding {
  bool byte_level = false;          // tokens are spelled in the byte alphabet
  bool metaspace = false;           // U+2581 in tokens is a space
  bool byte_tokens = false;         // <0x00> to <0xFF> are bytes
  bool strips_first_space = false;  // the text of all tokens loses a space at its start
};

/// Each throws Error(unsupported) naming a component or option that is not known.
Normalizer read_normalizer(const nlohmann::json& normalizer);
struct Cutting {
  PreTokenizer pre_tokenizer;
  bool byte_level;  // pieces are spelled in the byte alphabet
};
Cutting read_pre_tokenizer(const nlohmann::json& pre_tokenizer);
Decoding read_decoder(const nlohmann::json& decoder);

/// The token that the post-processor puts before a text, if any.
std::optional<std::string> read_post_processor(const nlohmann::json& post_processor);

}  // namespace basin::text
