// What every part of the server knows of the model it serves.
#pragma once

#include <cstdint>
#include <string>

#include "engine/stream.h"
#include "models/model.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace basin::server {

struct ModelInfo {
  std::string name;  // as clients say it
  std::string path;
  std::int64_t created = 0;  // Unix time, for /v1/models
  const models::ModelConfig* config = nullptr;
  const text::Tokenizer* tokenizer = nullptr;
  const text::ChatFormat* chat = nullptr;  // null: the model's is not known, and `chat_problem` says why
  std::string chat_problem;
  std::string
      chat_template;  // of the model's files, for clients that write conversations themselves; may be empty
  engine::StreamOptions defaults;  // sink_tokens, window and positions of requests that do not say
  std::int64_t max_model_len =
      0;  // most tokens of a request and its answer; 0: the context, and with a window no limit
  std::int64_t page_tokens = 16, pages = 0;
  std::int64_t max_sequences = 0;

  /// Most tokens of a request under that mask.
  std::int64_t most_tokens(const kv::Policy& policy) const;
};

}  // namespace basin::server
