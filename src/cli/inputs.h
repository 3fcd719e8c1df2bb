// What the user hands in: text files and token files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace basin::text {
class Tokenizer;
}

namespace basin::cli {

/// The whole file, which must hold UTF-8, not be empty and have 256 MiB at most. Throws Error(not_found | io | invalid_argument).
std::string read_text(const std::string& path);

/// Token ids of `text` for a model to read: special tokens in it recognised, BOS first when the tokenizer says so.
struct Encoded {
  std::vector<std::int32_t> ids;
  bool bos_added = false;
};
Encoded encode_for_model(const text::Tokenizer& tokenizer, const std::string& text);

/// `input_ids` [T], int32 or int64, T >= 1, of a safetensors file. Throws Error(not_found | corrupt | ...).
std::vector<std::int32_t> read_tokens(const std::string& path);

}  // namespace basin::cli
