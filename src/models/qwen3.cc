// Qwen3 (dense): Llama with an RMS norm over each query and key head before rotation.
#include "models/architecture.h"

namespace basin::models {

const Architecture kQwen3{
    .name = "qwen3",
    .gguf_name = "qwen3",
    .hugging_face_names = hugging_face_names,
    .gguf_names = gguf_names,
    .qk_norm = true,
    .read_json =
        [](const JsonReader& in, ModelConfig&) {
          in.refuse_true("use_sliding_window");  // sliding_window alone has no effect in this family
        },
    .read_gguf = [](GgufReader&, ModelConfig&) {},
};

}  // namespace basin::models
