// What tells one decoder-only architecture from another. A model file fills one of these; load.cc lists them.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "models/model.h"

namespace basin::models {

struct Architecture {
  const char* name;  // Hugging Face's model_type and GGUF's general.architecture
  bool qk_norm;      // RMS norm over each query and key head before rotation
  ops::RopeLayout gguf_rope_layout;
  /// Refuses what this architecture's config.json may ask for and Basin does not have. Throws Error(unsupported).
  void (*check_config)(const nlohmann::json& config);
};

extern const Architecture kLlama;
extern const Architecture kQwen3;

}  // namespace basin::models
