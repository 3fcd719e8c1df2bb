// From the JSON of a request to what the engine is asked. Nothing here answers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/fields.h"
#include "server/model_info.h"

namespace basin::server {

struct Asked {
  std::vector<engine::Request> requests;  // one for each prompt; on_event is not set
  std::string model;                      // to be named in the answer
  bool stream = false, include_usage = false, continuous_usage = false;
  text::ChatOptions chat;  // how the messages were written, and so the answer
  bool echo = false;
  bool list = false;                     // the prompts were a list, and so is the answer
  std::optional<std::int64_t> logprobs;  // alternatives to show
};

/// Throw ApiError. Unknown fields are ignored; fields that mean something and are not supported are refused by name.
Asked ask_completion(const nlohmann::json& body, const ModelInfo& model);
/// `tools` in the order in which they and their keys were sent; null when there are none.
Asked ask_chat(const nlohmann::json& body, const nlohmann::ordered_json& tools, const ModelInfo& model);
/// The form of SGLang's /generate.
Asked ask_generate(const nlohmann::json& body, const ModelInfo& model);

/// Text as a model reads it: special tokens recognised, BOS first when the tokenizer says so.
std::vector<std::int32_t> encode_prompt(const text::Tokenizer& tokenizer, const std::string& text);

/// sink_tokens, window and positions, or the server's own. Throws ApiError.
kv::Policy read_policy(const Fields& fields, const ModelInfo& model);

}  // namespace basin::server
