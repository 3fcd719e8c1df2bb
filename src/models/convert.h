// A checkpoint written again with another type of weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "basin/base/dtype.h"
#include "basin/base/thread_pool.h"

namespace basin::models {

struct ConvertReport {
  std::int64_t tensors = 0;
  std::int64_t converted = 0;  // the others were copied
  std::int64_t bytes = 0;      // of all tensors as written
};

/// Megabytes of tensors written, and of all.
using OnConverted = std::function<void(std::int64_t done, std::int64_t total)>;

/// Writes the model `in` (as load() takes it) to `out`: a GGUF file where its name ends in .gguf, a safetensors file where it ends
/// in .safetensors, else a directory in the Hugging Face layout, which is made. Matrices become `dtype`, or keep their type where it is
/// nothing; vectors become f32 (converted_dtype); what already has its type is copied bit for bit. Metadata, configuration and
/// tokenizer come along; between the formats that is for Llama, Qwen3, gpt-oss and Gemma 3, and others are refused by name. gpt-oss's
/// experts in MXFP4 are laid out anew, bit for bit, where they keep their type.
/// Files appear when they are complete. Throws Error(unsupported | invalid_argument | corrupt | not_found | io) naming what the
/// format of `out` cannot hold, before anything is written; only values beyond `dtype`'s range are found while writing.
ConvertReport convert(const std::filesystem::path& in, const std::filesystem::path& out,
                      std::optional<DType> dtype, ThreadPool& pool, const OnConverted& on_converted);

}  // namespace basin::models
