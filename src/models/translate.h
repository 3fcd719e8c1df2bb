// A model of the Hugging Face layout in GGUF's words, and the other way.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/architecture.h"
#include "models/model.h"
#include "weights/gguf_writer.h"

namespace basin::models {

/// A tensor of one format as the other has it.
struct Translated {
  weights::Tensor tensor;  // under its new name; the data is there where `part` is empty
  /// Makes the bytes of part i of `parts`, all of one size, along the first dimension.
  std::function<std::vector<std::byte>(std::int64_t i)> part;
  std::int64_t parts = 1;
};

/// The tensors of a checkpoint as the other format has them, in its order. `wanted` is what matrices will become, nothing where they
/// keep their type: experts in MXFP4 then stay so. The result refers to `tensors`' data. Throws Error(unsupported) naming a tensor
/// without a name there, or an architecture.
std::vector<Translated> translate(const std::vector<weights::Tensor>& tensors,
                                  const Architecture& architecture, const ModelConfig& config, bool to_gguf,
                                  std::optional<DType> wanted);

/// "general." and the architecture's own keys. Throws Error(unsupported) naming what GGUF has no key for.
void add_gguf_config(const Architecture& architecture, const ModelConfig& config, const std::string& where,
                     weights::GgufMetadata& metadata);

/// config.json. Throws Error(unsupported) naming what it cannot say.
nlohmann::ordered_json hugging_face_config(const ModelConfig& config, const std::string& where);

}  // namespace basin::models
