// The experts of gpt-oss in the other format.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "models/translate.h"

namespace basin::models {

/// The experts of all layers. Names of what went into the result join `used`.
std::vector<Translated> translate_experts(const std::map<std::string, weights::Tensor>& tensors,
                                          const Architecture& architecture, const ModelConfig& config,
                                          bool to_gguf, std::optional<DType> wanted,
                                          std::set<std::string>& used);

}  // namespace basin::models
