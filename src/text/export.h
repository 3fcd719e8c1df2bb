// A BPE tokenizer, byte-level or SentencePiece's, in the files of the other format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "weights/gguf_writer.h"

namespace basin::text {

/// What stands beside the weights in the Hugging Face layout.
struct TokenizerFiles {
  std::string tokenizer;          // tokenizer.json
  std::string tokenizer_config;   // tokenizer_config.json, with the chat template
  std::string generation_config;  // generation_config.json
};

/// Of the tokenizer.ggml.* of a GGUF file. Throws Error(unsupported) naming a tokenizer model that this cannot be, and as
/// Tokenizer::from_gguf does.
TokenizerFiles hugging_face_files(const weights::GgufFile& file);

/// tokenizer.ggml.* of the tokenizer.json in `directory`, padded to `vocabulary` tokens. Throws Error(unsupported) naming what GGUF
/// has no word for, and as Tokenizer::from_directory does.
void add_gguf_tokenizer(const std::filesystem::path& directory, std::int64_t vocabulary,
                        weights::GgufMetadata& metadata);

}  // namespace basin::text
