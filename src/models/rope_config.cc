#include "models/rope_config.h"

#include <fmt/format.h>

#include <set>

#include "basin/base/error.h"

namespace basin::models {
namespace {

using nlohmann::json;

void read_yarn(const JsonReader& in, std::int64_t context, ops::RopeConfig& rope) {
  rope.type = ops::RopeType::yarn;
  rope.original_context = in.count_or("original_max_position_embeddings", context);
  rope.beta_fast = in.number_or("beta_fast", 32.0);
  rope.beta_slow = in.number_or("beta_slow", 1.0);
  rope.truncate = in.flag_or("truncate", true);
  rope.attention_factor = in.number_or("attention_factor", 0.0);
  if (rope.attention_factor == 0 && in.has("attention_factor"))
    throw Error(ErrorCode::corrupt, fmt::format("{}: 'attention_factor' is 0", in.where()));
  rope.mscale = in.number_or("mscale", 0.0);
  rope.mscale_all_dim = in.number_or("mscale_all_dim", 0.0);
}

void read_llama3(const JsonReader& in, ops::RopeConfig& rope) {
  rope.type = ops::RopeType::llama3;
  rope.low_freq_factor = in.number("low_freq_factor");
  rope.high_freq_factor = in.number("high_freq_factor");
  rope.original_context = in.count("original_max_position_embeddings");
}

// Everything but theta.
void read_type(const JsonReader& in, std::int64_t context, ops::RopeConfig& rope) {
  const json& section = in.object();
  const json type = in.has("rope_type") ? section["rope_type"]
                    : in.has("type")    ? section["type"]
                                        : json("default");
  if (in.has("type") && type != section["type"]) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: 'rope_type' is {} and 'type' is {}", in.where(),
                                                JsonReader::shown(type), in.shown("type")));
  }
  std::set<std::string> known = {"rope_type", "type", "rope_theta"};
  if (type == "default") {
    rope.type = ops::RopeType::standard;
  } else if (type == "linear") {
    rope.type = ops::RopeType::linear;
    known.insert("factor");
  } else if (type == "llama3") {
    read_llama3(in, rope);
    known.insert({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
  } else if (type == "yarn") {
    read_yarn(in, context, rope);
    known.insert({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
                  "attention_factor", "mscale", "mscale_all_dim"});
  } else {
    in.refuse(fmt::format("rope type {}", JsonReader::shown(type)), "default, linear, llama3 and yarn");
  }
  if (rope.type != ops::RopeType::standard) rope.factor = in.number("factor");
  for (const auto& [key, value] : section.items()) {
    if (!known.contains(key) && !value.is_null()) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: '{}' = {} has no meaning here that is supported (rope type {})",
                              in.where(), key, JsonReader::shown(value), JsonReader::shown(type)));
    }
  }
}

}  // namespace

ops::RopeConfig read_rope(const JsonReader& top, const char* kind, double theta, std::int64_t d_head,
                          std::int64_t context) {
  const bool newer = top.has("rope_parameters"), older = top.has("rope_scaling");
  if (newer && older && top.object()["rope_parameters"] != top.object()["rope_scaling"]) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{} has rope_parameters and rope_scaling, and they differ", top.where()));
  }
  ops::RopeConfig rope;
  rope.rotary_dim = d_head;
  rope.theta = top.number_or("rope_theta", theta);
  if (!newer && !older) return rope;

  const char* name = newer ? "rope_parameters" : "rope_scaling";
  JsonReader in = top.section(name);
  if (kind != nullptr && in.has(kind)) {
    const JsonReader section = in.section(kind);
    rope.theta = section.number_or("rope_theta", theta);  // what stands outside belongs to no kind
    read_type(section, context, rope);
    return rope;
  }
  const double inside = in.number_or("rope_theta", rope.theta);
  if (top.has("rope_theta") && inside != rope.theta) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: rope_theta is {} and, inside {}, {}", top.where(),
                                                rope.theta, name, inside));
  }
  rope.theta = inside;
  read_type(in, context, rope);
  return rope;
}

ops::RopeConfig read_rope(GgufReader& in, double theta, std::int64_t d_head) {
  ops::RopeConfig rope;
  rope.rotary_dim = in.count_or("rope.dimension_count", d_head);
  if (rope.rotary_dim != d_head) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: rope.dimension_count {} differs from the head size {}", in.where(),
                            rope.rotary_dim, d_head));
  }
  rope.theta = in.number_or("rope.freq_base", theta);
  const std::string type = in.text_or("rope.scaling.type", "none");
  if (type == "none") return rope;
  rope.factor = in.number_or("rope.scaling.factor", 1.0);
  if (type == "linear") {
    rope.type = ops::RopeType::linear;
  } else if (type == "yarn") {
    rope.type = ops::RopeType::yarn;
    rope.original_context = in.count("rope.scaling.original_context_length");
    rope.beta_fast = in.number_or("rope.scaling.yarn_beta_fast", rope.beta_fast);
    rope.beta_slow = in.number_or("rope.scaling.yarn_beta_slow", rope.beta_slow);
    const double factor = in.number_or("rope.scaling.attn_factor", 1.0);
    if (factor != 1.0) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: rope.scaling.attn_factor {} is not supported", in.where(), factor));
    }
  } else {
    throw Error(
        ErrorCode::unsupported,
        fmt::format("{}: rope.scaling.type '{}' is not supported; supported are none, linear and yarn",
                    in.where(), type));
  }
  in.ignore_flag("rope.scaling.finetuned");  // a remark, not maths
  return rope;
}

}  // namespace basin::models
