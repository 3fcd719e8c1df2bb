// The decoder-only transformer that all architectures share, over a checkpoint's mapped tensors.
#pragma once

#include <memory>

#include "models/architecture.h"
#include "models/model.h"
#include "models/tensor_table.h"

namespace basin::models {

enum class Format { hugging_face, gguf };

/// `owner` keeps the mapping that `tensors` points into. Every tensor is consumed or refused by name.
std::unique_ptr<Model> make_decoder(const Architecture& architecture, Format format, ModelConfig config,
                                    TensorTable tensors, std::shared_ptr<const void> owner);

}  // namespace basin::models
