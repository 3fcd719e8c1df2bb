// Configurations from config.json and from GGUF metadata. Hostile until checked; what would change the maths and is not
// supported is refused by name.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "models/architecture.h"
#include "models/model.h"
#include "weights/gguf.h"

namespace basin::models {

/// Throws Error(unsupported) when `key` is present, not null.
void refuse_unless_null(const nlohmann::json& config, const char* key);
/// Throws Error(unsupported) when `key` is true.
void refuse_true(const nlohmann::json& config, const char* key);

/// `where` names the file in messages. Throws Error(corrupt | unsupported).
ModelConfig read_hf_config(const nlohmann::json& config, const Architecture& architecture,
                           const std::string& where);
ModelConfig read_gguf_config(const weights::GgufFile& file, const Architecture& architecture,
                             const std::string& where);

}  // namespace basin::models
