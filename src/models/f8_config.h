// What config.json says of F8_E4M3 weights.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "weights/weights.h"

namespace basin::models {

/// Takes the 'quantization_config' of method fp8 out of `config`; other methods stay there. Throws Error(unsupported) naming what
/// of it has no support here. `where` names the file in messages.
std::optional<weights::F8Block> take_f8_block(nlohmann::json& config, const std::string& where);

}  // namespace basin::models
