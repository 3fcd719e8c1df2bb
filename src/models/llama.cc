// Llama (and SmolLM2): RMS norm, grouped-query attention with RoPE, SwiGLU.
#include "models/architecture.h"

namespace basin::models {

const Architecture kLlama{
    .name = "llama",
    .gguf_name = "llama",
    .hugging_face_names = hugging_face_names,
    .gguf_names = gguf_names,
    .gguf_rope_layout = ops::RopeLayout::interleaved,
    .read_json = [](const JsonReader& in, ModelConfig&) { in.refuse_unless_null("sliding_window"); },
    .read_gguf = [](GgufReader&, ModelConfig&) {},
};

}  // namespace basin::models
