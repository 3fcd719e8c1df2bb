// Qwen3 (dense): Llama with an RMS norm over each query and key head before rotation.
#include "models/architecture.h"
#include "models/config.h"

namespace basin::models {

const Architecture kQwen3{
    .name = "qwen3",
    .qk_norm = true,
    .gguf_rope_layout = ops::RopeLayout::half,
    .check_config =
        [](const nlohmann::json& config) {
          refuse_true(config, "use_sliding_window");  // sliding_window alone has no effect in this family
        },
};

}  // namespace basin::models
