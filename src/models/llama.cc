// Llama (and SmolLM2): RMS norm, grouped-query attention with RoPE, SwiGLU.
#include "models/architecture.h"
#include "models/config.h"

namespace basin::models {

const Architecture kLlama{
    .name = "llama",
    .qk_norm = false,
    .gguf_rope_layout = ops::RopeLayout::interleaved,
    .check_config = [](const nlohmann::json& config) { refuse_unless_null(config, "sliding_window"); },
};

}  // namespace basin::models
