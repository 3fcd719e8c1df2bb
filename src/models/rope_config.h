// RoPE as configurations spell it.
#pragma once

#include "models/gguf_reader.h"
#include "models/json_reader.h"
#include "ops/rope.h"

namespace basin::models {

/// Both spellings: rope_scaling (rope_type or type) beside rope_theta, and rope_parameters that holds everything. `theta`
/// is the base where none is named; `kind`, when not null, names the section of rope_parameters for that kind of layers,
/// where there are such sections.
ops::RopeConfig read_rope(const JsonReader& top, const char* kind, double theta, std::int64_t d_head,
                          std::int64_t context);

ops::RopeConfig read_rope(GgufReader& in, double theta, std::int64_t d_head);

}  // namespace basin::models
