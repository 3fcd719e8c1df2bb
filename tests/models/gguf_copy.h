// A checkpoint of the Hugging Face layout as a GGUF file, the way llama.cpp's converter writes one.
#pragma once

#include <filesystem>
#include <string>

#include "models/checkpoint.h"

namespace basin::test {

/// The whole file. Names, metadata and order of dimensions are GGUF's; vectors become F32. For the llama architecture
/// the rows of Q and K are permuted, so that the pairs (i, i + d/2) that rotate together become (2i, 2i + 1), and the
/// frequencies of Llama 3.1 become a tensor; Gemma's norms include the one that is added to them; gpt-oss's experts are
/// stacked by product. Throws std::runtime_error for what this writer lacks.
std::string gguf_copy(const Checkpoint& checkpoint);

}  // namespace basin::test
