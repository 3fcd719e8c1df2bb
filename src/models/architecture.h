// What tells one decoder-only architecture from another. A model file fills one of these; load.cc lists them.
#pragma once

#include <span>
#include <string>

#include "models/gguf_reader.h"
#include "models/json_reader.h"
#include "models/model.h"
#include "models/tensor_names.h"

namespace basin::models {

struct Architecture {
  const char* name;                 // model_type of config.json, and what users see
  const char* gguf_name = nullptr;  // general.architecture of a GGUF file; null: no such file is read
  TensorNames (*hugging_face_names)();
  TensorNames (*gguf_names)() = nullptr;

  bool qk_norm = false;         // RMS norm over each query and key head before rotation
  bool attention_bias = false;  // of all four projections
  bool post_norms = false;      // over what attention and feed-forward add
  bool sink_logits = false;     // in every layer
  bool local_rope = false;      // layers with a window have a RoPE of their own
  bool tied_by_default = false;
  float norm_offset = 0.0f;  // safetensors hold norm weights without it; GGUF files hold the sum
  Activation activation = Activation::silu;
  double rope_theta = 10000.0;  // where config.json names none
  std::int64_t full_every =
      0;  // without a list of layer types, each so many layers one has full attention, the last; the
          // others have a window. 0 = all do, and no window is known.
  ops::RopeLayout gguf_rope_layout = ops::RopeLayout::half;

  std::span<const char* const> full_types = {};  // of layer_types, beside full_attention, that mean no window
  std::span<const char* const> own_keys =
      {};  // of config.json, refused where they are not an architecture's own
  /// Reads what no other architecture has, after everything else; refuses what the architecture may ask for and Basin
  /// does not have. Throws Error(corrupt | unsupported).
  void (*read_json)(const JsonReader& in, ModelConfig& config);
  void (*read_gguf)(GgufReader& in, ModelConfig& config) = nullptr;
};

extern const Architecture kDeepseekV3;
extern const Architecture kDeepseekV32;
extern const Architecture kGemma3;
extern const Architecture kGlmMoeDsa;
extern const Architecture kGptOss;
extern const Architecture kLlama;
extern const Architecture kQwen3;

/// GGUF has no key for the scale of Gemma 3's scores: the largest model, known by its layers, scales by its width over its heads.
double gemma3_gguf_scale(const ModelConfig& config);

/// By the name that a file's format has for it: `spelling` is &Architecture::name or gguf_name; `where` names the file. Throws
/// Error(unsupported) that lists the known.
const Architecture& find_architecture(const std::string& name, const char* Architecture::*spelling,
                                      const std::string& where);

}  // namespace basin::models
