// Configurations from config.json and from GGUF metadata. Hostile until checked; what would change the maths and is not
// supported is refused by name.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "models/architecture.h"
#include "models/model.h"

namespace basin::models {

/// `where` names the file in messages. Throws Error(corrupt | unsupported).
ModelConfig read_hf_config(const nlohmann::json& config, const Architecture& architecture,
                           const std::string& where);
ModelConfig read_gguf_config(const weights::GgufFile& file, const Architecture& architecture,
                             const std::string& where);

/// Refuses a configuration whose parts contradict each other.
void check_sizes(const ModelConfig& config, const std::string& where);

}  // namespace basin::models
