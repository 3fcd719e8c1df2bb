// A model of the Hugging Face layout in GGUF's words, and the other way.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "models/architecture.h"
#include "models/model.h"
#include "weights/gguf_writer.h"

namespace basin::models {

/// How a tensor of one format is called in the other.
struct Translated {
  weights::Tensor tensor;  // under its new name
  std::int64_t heads = 0;  // rows of this many heads change their order with the format; 0 = they do not
};

/// The tensors of a checkpoint under the other format's names, in its order. Throws Error(unsupported) naming one without a name there.
std::vector<Translated> translate(const std::vector<weights::Tensor>& tensors,
                                  const Architecture& architecture, const ModelConfig& config, bool to_gguf);

/// The bytes of `tensor` with the rows of each head in the other format's order: GGUF rotates neighbours, Hugging Face halves.
std::vector<std::byte> reordered(const weights::Tensor& tensor, std::int64_t heads, bool to_gguf);

/// "general." and the architecture's own keys. Throws Error(unsupported) naming what GGUF has no key for.
void add_gguf_config(const ModelConfig& config, const std::string& where, weights::GgufMetadata& metadata);

/// config.json. Throws Error(unsupported) naming what it cannot say.
nlohmann::ordered_json hugging_face_config(const ModelConfig& config, const std::string& where);

}  // namespace basin::models
