#include "server/ask.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>

namespace basin::server {
namespace {

using nlohmann::json;

constexpr std::int64_t kMostChoices = 128, kMostPrompts = 2048, kMostLogprobs = 20;
constexpr std::size_t kMostStops = 16, kMostStopBytes = 1024, kMostBiases = 1024;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMostPromptTokens = 1 << 20;  // with a window as well
constexpr std::int64_t kMostKept = 1 << 22;  // tokens and alternatives that are held until an answer is whole

std::uint64_t random_seed() {
  static thread_local std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// Options that other servers have, and that would change the answer.
void refuse_unsupported(const Fields& fields) {
  for (const char* name : {"suffix", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                           "structured_outputs", "json_schema", "regex", "ebnf", "prompt_embeds", "bad_words",
                           "allowed_token_ids", "truncate_prompt_tokens", "lora_path", "prediction", "audio",
                           "web_search_options", "logits_processors", "custom_logit_processor"})
    fields.refuse(name, {""});
  fields.refuse("use_beam_search", {false});
  fields.refuse("prompt_logprobs", {false});
  fields.refuse("length_penalty", {1.0, 1, 0, 0.0});
  fields.refuse("min_tokens", {0});
  fields.refuse("min_new_tokens", {0});
  fields.refuse("return_hidden_states", {false});
  fields.refuse("modalities", {json::array({"text"})});
  const json* format = fields.get("response_format");
  if (format != nullptr && !(format->is_object() && format->value("type", json()) == "text"))
    fields.fail("response_format", "is not {\"type\": \"text\"}, and nothing else is supported here");
}

void read_sampling(const Fields& fields, engine::Request& request) {
  ops::SamplingOptions& options = request.sampling.options;
  options.temperature = fields.number("temperature").value_or(1.0);
  options.top_p = fields.number("top_p").value_or(1.0);
  options.min_p = fields.number("min_p").value_or(0.0);
  options.top_k = std::max<std::int64_t>(0, fields.integer("top_k", -1).value_or(0));  // -1 is off elsewhere
  options.repetition_penalty = fields.number("repetition_penalty").value_or(1.0);
  // Any whole number; its 64 bits are the seed.
  const auto seed = fields.integer("seed", std::numeric_limits<std::int64_t>::min());
  options.seed = seed ? static_cast<std::uint64_t>(*seed) : random_seed();
  request.sampling.presence_penalty = fields.number("presence_penalty").value_or(0.0);
  request.sampling.frequency_penalty = fields.number("frequency_penalty").value_or(0.0);
}

void read_logit_bias(const Fields& fields, engine::Request& request) {
  const json* bias = fields.get("logit_bias");
  if (bias == nullptr) return;
  if (!bias->is_object()) fields.fail("logit_bias", "must be an object of token ids and numbers");
  if (bias->size() > kMostBiases)
    fields.fail("logit_bias", fmt::format("has {} entries; allowed are {}", bias->size(), kMostBiases));
  for (const auto& [key, value] : bias->items()) {
    const bool digits = !key.empty() && key.size() <= 9 &&
                        std::ranges::all_of(key, [](char c) { return c >= '0' && c <= '9'; });
    if (!digits || !value.is_number())
      fields.fail("logit_bias", "must be an object of token ids and numbers");
    request.sampling.logit_bias.emplace_back(std::stoi(key), value.get<double>());
  }
}

void read_stops(const Fields& fields, engine::Request& request) {
  request.stops = fields.strings("stop");
  if (request.stops.size() > kMostStops)
    fields.fail("stop", fmt::format("has more than {} strings", kMostStops));
  for (const std::string& stop : request.stops) {
    if (stop.empty() || stop.size() > kMostStopBytes)
      fields.fail("stop",
                  fmt::format("has a string of {} bytes; allowed are 1 to {}", stop.size(), kMostStopBytes));
  }
  request.stop_ids = fields.token_ids("stop_token_ids");
  request.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  request.show_special = !fields.boolean("skip_special_tokens").value_or(true);
}

// When it has its turn, and for how long.
void read_turn(const Fields& fields, engine::Request& request) {
  request.priority = fields.integer("priority", -1000, 1000).value_or(request.priority);
  if (const auto seconds = fields.number("timeout_seconds")) {
    if (!(*seconds > 0 && *seconds <= 1e6)) fields.fail("timeout_seconds", "must be above 0, up to 1000000");
    request.timeout_us = static_cast<std::int64_t>(*seconds * 1e6);
  }
}

// All that does not depend on the form of the endpoint.
engine::Request read_common(const Fields& fields, const ModelInfo& model) {
  refuse_unsupported(fields);
  engine::Request request;
  read_sampling(fields, request);
  read_logit_bias(fields, request);
  read_stops(fields, request);
  request.include_stop = fields.boolean("include_stop_str_in_output").value_or(false);
  request.policy = read_policy(fields, model);
  request.choices = fields.integer("n", 1, kMostChoices).value_or(1);
  read_turn(fields, request);
  return request;
}

void read_stream(const Fields& fields, Asked& asked) {
  asked.stream = fields.boolean("stream").value_or(false);
  const json* options = fields.get("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) fields.fail("stream_options", "must be an object");
  if (!asked.stream) fields.fail("stream_options", "is there, but stream is not true");
  const Fields own(*options, "stream_options.");
  asked.include_usage = own.boolean("include_usage").value_or(false);
  asked.continuous_usage = own.boolean("continuous_usage_stats").value_or(false);
}

void read_model(const Fields& fields, const ModelInfo& model, Asked& asked) {
  asked.model = fields.string("model").value_or(model.name);
  if (asked.model == model.name || asked.model == model.path) return;
  throw ApiError(
      404, fmt::format("the model '{}' is not served here; '{}' is", asked.model.substr(0, 200), model.name),
      "model", "model_not_found");
}

// How many tokens may be chosen: what was asked, or, when nothing was, what fits.
std::int64_t answer_tokens(std::optional<std::int64_t> asked, const char* field, std::int64_t prompt_tokens,
                           const engine::Request& request, const ModelInfo& model) {
  const std::int64_t most = model.most_tokens(request.policy);
  const auto too_long = [&](const std::string& what) {
    throw ApiError(
        400,
        fmt::format("{}, and a request may have {} with its answer{}", what, most,
                    request.policy.window == 0 ? "; with sink_tokens and window it may be longer" : ""),
        "messages", "context_length_exceeded");
  };
  if (prompt_tokens > kMostPromptTokens) {
    throw ApiError(400,
                   fmt::format("the prompt has {} tokens; allowed are {}", prompt_tokens, kMostPromptTokens),
                   "messages", "context_length_exceeded");
  }
  if (prompt_tokens > most || (prompt_tokens == most && asked.value_or(1) > 0))
    too_long(fmt::format("the prompt has {} tokens", prompt_tokens));
  if (asked) {
    if (*asked > most - prompt_tokens)
      too_long(fmt::format("the prompt has {} tokens and {} is {}", prompt_tokens, field, *asked));
    return *asked;
  }
  const std::int64_t context = model.config->context;
  const std::int64_t room =
      request.policy.window == 0 ? std::min(most, model.pages * model.page_tokens) : context;
  return std::max<std::int64_t>(
      1, request.policy.window == 0 ? room - prompt_tokens : std::min(room, most - prompt_tokens));
}

std::int64_t kept_for_each_token(const engine::Request& request) {
  return request.choices * (request.logprobs.value_or(0) + 1);
}

// What all prompts of a body, and the answer that is `held` until it is whole, may take of memory.
void check_size(const Asked& asked, bool held, const char* field) {
  std::int64_t waiting = 0, kept = 0;
  for (const engine::Request& request : asked.requests) {
    const auto prompt = static_cast<std::int64_t>(request.prompt.size());
    waiting += request.waiting_tokens();
    kept += kept_for_each_token(request) *
            ((held ? request.max_tokens : 0) + (request.prompt_logprobs ? prompt : 0));
  }
  if (waiting > engine::kMostWaitingTokens) {
    throw ApiError(400,
                   fmt::format("the prompts times n have {} tokens; allowed are {}", waiting,
                               engine::kMostWaitingTokens),
                   "n");
  }
  if (kept > kMostKept) {
    throw ApiError(
        400,
        fmt::format("{} times n times (log-probabilities + 1) is {}; an answer that is held until it is "
                    "whole may have {}",
                    field, kept, kMostKept),
        field);
  }
}

// prompt: a text, several texts, token ids, or several lists of them.
std::vector<std::vector<std::int32_t>> read_prompts(const Fields& fields, const ModelInfo& model) {
  const json* prompt = fields.get("prompt");
  if (prompt == nullptr) fields.fail("prompt", "is missing");
  const auto encode = [&](const json& text) {
    return encode_prompt(*model.tokenizer, text.get<std::string>());
  };
  if (prompt->is_string()) return {encode(*prompt)};
  if (!prompt->is_array() || prompt->empty())
    fields.fail("prompt",
                "must be a string, a list of strings, a list of token ids, or a list of such lists");
  if (prompt->front().is_number()) return {to_token_ids(*prompt, "prompt")};
  if (static_cast<std::int64_t>(prompt->size()) > kMostPrompts)
    fields.fail("prompt", fmt::format("has more than {} entries", kMostPrompts));
  std::vector<std::vector<std::int32_t>> prompts;
  for (const json& entry : *prompt) {
    if (entry.is_string() != prompt->front().is_string()) fields.fail("prompt", "mixes texts and token ids");
    prompts.push_back(entry.is_string() ? encode(entry) : to_token_ids(entry, "prompt"));
  }
  return prompts;
}

void check_prompt(const std::vector<std::int32_t>& prompt, const char* field, const ModelInfo& model) {
  if (prompt.empty())
    throw ApiError(400, fmt::format("{} has no tokens; at least one is needed", field), field);
  for (const std::int32_t id : prompt) {
    if (id >= model.config->vocabulary)
      throw ApiError(
          400, fmt::format("{} has token id {}; the vocabulary has {}", field, id, model.config->vocabulary),
          field);
  }
}

void check_sampling(const engine::Request& request, const ModelInfo& model) {
  try {
    engine::check(request.sampling, model.config->vocabulary);
  } catch (const Error& error) {
    const std::string message = error.what();
    throw ApiError(400, message, message.substr(0, message.find(' ')));
  }
}

std::string content_text(const json& content, const Fields& fields) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array())
    fields.fail("messages", "has a content that is neither a string nor a list of parts");
  std::string text;
  for (const json& part : content) {
    if (!part.is_object() || part.value("type", json()) != "text" || !part.contains("text") ||
        !part["text"].is_string())
      fields.fail(
          "messages",
          "has a part that is not {\"type\": \"text\", \"text\": ...}; nothing else is supported here");
    text += part["text"].get<std::string>();
  }
  return text;
}

text::ToolCall read_tool_call(const json& entry, const Fields& fields) {
  const json function = entry.is_object() ? entry.value("function", json()) : json();
  const bool complete = function.is_object() && function.value("name", json()).is_string() &&
                        function.value("arguments", json()).is_string();
  if (!complete) fields.fail("messages", "has a tool call without function.name and function.arguments");
  const json id = entry.value("id", json());
  return {id.is_string() ? id.get<std::string>() : "", function["name"].get<std::string>(),
          function["arguments"].get<std::string>()};
}

text::Message read_message(const json& entry, const Fields& fields) {
  if (!entry.is_object()) fields.fail("messages", "has an entry that is not an object");
  const json role = entry.value("role", json());
  text::Message message;
  if (role.is_string()) message.role = role.get<std::string>();
  constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};
  if (std::ranges::find(kRoles, message.role) == kRoles.end())
    fields.fail("messages", fmt::format("has a role other than {}", fmt::join(kRoles, ", ")));
  const bool assistant = message.role == "assistant";
  const json content = entry.value("content", json());
  if (content.is_null() && !assistant) fields.fail("messages", "has a message without content");
  if (!content.is_null()) message.content = content_text(content, fields);
  const Fields own(entry, "messages.");
  if (assistant) {
    message.reasoning = own.string("reasoning_content").value_or("");
    if (const json* calls = own.get("tool_calls")) {
      if (!calls->is_array()) fields.fail("messages", "has tool_calls that are no list");
      for (const json& call : *calls) message.tool_calls.push_back(read_tool_call(call, fields));
    }
  }
  if (message.role == "tool") message.tool_call_id = own.string("tool_call_id").value_or("");
  return message;
}

std::vector<text::Message> read_messages(const Fields& fields) {
  const json* list = fields.get("messages");
  if (list == nullptr || !list->is_array() || list->empty())
    fields.fail("messages", "must be a list of at least one message");
  std::vector<text::Message> messages;
  for (const json& entry : *list) messages.push_back(read_message(entry, fields));
  return messages;
}

// How the conversation is written: tools, and how much the model thinks.
text::ChatOptions read_chat_options(const Fields& fields, const nlohmann::ordered_json& tools,
                                    const ModelInfo& model) {
  text::ChatOptions options;
  fields.refuse("functions", {json::array()});
  fields.refuse("function_call", {"none", "auto"});
  fields.refuse("parallel_tool_calls", {true});
  fields.refuse("tool_choice", {"none", "auto"});
  fields.refuse("chat_template", {""});
  fields.refuse("continue_final_message", {false});
  fields.refuse("add_generation_prompt", {true});
  if (!tools.is_null() && !tools.is_array()) fields.fail("tools", "must be a list");
  if (fields.string("tool_choice").value_or("auto") == "auto") {
    for (const auto& tool : tools) options.tools.push_back(tool.dump());
  }
  if (const auto effort = fields.string("reasoning_effort")) {
    const bool known = *effort == "low" || *effort == "medium" || *effort == "high";
    if (*effort == "none") {
      options.thinking = false;
    } else if (!known || model.chat->name() != "harmony") {
      fields.fail("reasoning_effort",
                  fmt::format("is '{}', which this model does not know", effort->substr(0, 40)));
    }
    options.reasoning_effort = known ? *effort : "";
  }
  if (const json* kwargs = fields.get("chat_template_kwargs")) {
    if (!kwargs->is_object()) fields.fail("chat_template_kwargs", "must be an object");
    const Fields own(*kwargs, "chat_template_kwargs.");
    for (const auto& [key, value] : kwargs->items()) {
      if (key != "enable_thinking") own.refuse(key.c_str());
    }
    options.thinking = own.boolean("enable_thinking").value_or(options.thinking);
  }
  return options;
}

}  // namespace

std::int64_t ModelInfo::most_tokens(const kv::Policy& policy) const {
  if (max_model_len > 0) return policy.window == 0 ? std::min(max_model_len, config->context) : max_model_len;
  return policy.window == 0 ? config->context : kMostTokens;
}

std::vector<std::int32_t> encode_prompt(const text::Tokenizer& tokenizer, const std::string& text) {
  const std::vector<std::int32_t> encoded = tokenizer.encode(text, true);
  const auto bos = tokenizer.bos();
  std::vector<std::int32_t> ids;
  if (tokenizer.adds_bos() && bos && (encoded.empty() || encoded.front() != *bos)) ids.push_back(*bos);
  ids.insert(ids.end(), encoded.begin(), encoded.end());
  return ids;
}

kv::Policy read_policy(const Fields& fields, const ModelInfo& model) {
  const auto sink_tokens = fields.integer("sink_tokens", 0, kMostTokens);
  const auto positions = fields.string("positions");
  if (positions && *positions != "in-cache" && *positions != "absolute")
    fields.fail("positions", "must be \"in-cache\" or \"absolute\"");
  kv::Policy policy;
  policy.in_cache_positions =
      positions ? *positions == "in-cache" : model.defaults.positions == engine::PositionMode::in_cache;
  policy.window = fields.integer("window", 1, kMostTokens)
                      .value_or(fields.is_null("window") ? 0 : model.defaults.window.value_or(0));
  if (policy.window == 0) {
    if (sink_tokens.value_or(0) > 0)
      fields.fail("sink_tokens", "means nothing without window: all tokens are visible then");
    return policy;
  }
  policy.sink_tokens = sink_tokens.value_or(model.defaults.sink_tokens);
  if (policy.in_cache_positions && policy.sink_tokens + policy.window > model.config->context) {
    fields.fail("window",
                fmt::format("is {} with {} sink tokens, more than the trained context of {}; with positions "
                            "\"absolute\" it may be",
                            policy.window, policy.sink_tokens, model.config->context));
  }
  return policy;
}

Asked ask_completion(const json& body, const ModelInfo& model) {
  const Fields fields(body);
  Asked asked;
  read_model(fields, model, asked);
  read_stream(fields, asked);
  fields.refuse("add_special_tokens", {true});
  const engine::Request common = [&] {
    engine::Request request = read_common(fields, model);
    request.logprobs = fields.integer("logprobs", 0, kMostLogprobs);
    asked.logprobs = request.logprobs;
    asked.echo = fields.boolean("echo").value_or(false);
    if (asked.echo) request.prompt_logprobs = request.logprobs;
    check_sampling(request, model);
    return request;
  }();
  if (fields.integer("best_of", 1).value_or(common.choices) != common.choices &&
      fields.integer("best_of", 1) != 1)
    fields.fail("best_of", "differs from n, which is not supported here");
  const auto max_tokens = fields.integer("max_tokens", 0, kMostTokens);
  for (std::vector<std::int32_t>& prompt : read_prompts(fields, model)) {
    check_prompt(prompt, "prompt", model);
    engine::Request request = common;
    request.max_tokens = answer_tokens(max_tokens.value_or(16), "max_tokens",
                                       static_cast<std::int64_t>(prompt.size()), request, model);
    request.prompt = std::move(prompt);
    asked.requests.push_back(std::move(request));
  }
  check_size(asked, !asked.stream, "max_tokens");
  return asked;
}

Asked ask_chat(const json& body, const nlohmann::ordered_json& tools, const ModelInfo& model) {
  const Fields fields(body);
  if (model.chat == nullptr) throw ApiError(400, model.chat_problem, "messages");
  Asked asked;
  read_model(fields, model, asked);
  read_stream(fields, asked);
  fields.refuse("add_special_tokens", {false});  // the format has written them
  fields.refuse("echo", {false});
  engine::Request request = read_common(fields, model);
  const auto top_logprobs = fields.integer("top_logprobs", 0, kMostLogprobs);
  if (fields.boolean("logprobs").value_or(false)) {
    asked.logprobs = request.logprobs = top_logprobs.value_or(0);
  } else if (top_logprobs) {
    fields.fail("top_logprobs", "is there, but logprobs is not true");
  }
  check_sampling(request, model);
  asked.chat = read_chat_options(fields, tools, model);
  const std::vector<text::Message> messages = read_messages(fields);
  try {
    request.prompt = model.chat->render(messages, asked.chat);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument && error.code() != ErrorCode::unsupported) throw;
    throw ApiError(400, error.what(), asked.chat.tools.empty() ? "messages" : "tools");
  }
  const bool newer = fields.get("max_completion_tokens") != nullptr;
  const char* field = newer ? "max_completion_tokens" : "max_tokens";
  const auto max_tokens = fields.integer(field, 1, kMostTokens);
  request.max_tokens =
      answer_tokens(max_tokens, field, static_cast<std::int64_t>(request.prompt.size()), request, model);
  if (!max_tokens && !asked.stream)
    request.max_tokens = std::min(request.max_tokens, kMostKept / kept_for_each_token(request));
  asked.requests.push_back(std::move(request));
  check_size(asked, !asked.stream, field);
  return asked;
}

Asked ask_generate(const json& body, const ModelInfo& model) {
  const Fields fields(body);
  Asked asked;
  asked.model = model.name;
  asked.stream = fields.boolean("stream").value_or(false);
  for (const char* name :
       {"input_embeds", "image_data", "audio_data", "video_data", "session_params", "lora_path"})
    fields.refuse(name);
  refuse_unsupported(fields);
  fields.refuse("add_special_tokens", {true});
  fields.refuse("return_logprob", {false});
  fields.refuse("return_hidden_states", {false});
  static const json kNone = json::object();
  const json* parameters = fields.get("sampling_params");
  if (parameters != nullptr && !parameters->is_object()) fields.fail("sampling_params", "must be an object");
  const Fields sampling(parameters == nullptr ? kNone : *parameters, "sampling_params.");
  sampling.refuse("add_special_tokens", {true});
  engine::Request common = read_common(sampling, model);
  // Basin's own fields may stand beside the prompt as well; those among the parameters go first.
  const bool own_policy =
      parameters != nullptr && (parameters->contains("sink_tokens") || parameters->contains("window") ||
                                parameters->contains("positions"));
  if (!own_policy) common.policy = read_policy(fields, model);
  read_turn(fields, common);
  read_turn(sampling, common);
  check_sampling(common, model);
  std::vector<std::vector<std::int32_t>> prompts;
  if (const json* ids = fields.get("input_ids")) {
    if (ids->is_array() && !ids->empty() && ids->front().is_array()) {
      asked.list = true;
      for (const json& entry : *ids) prompts.push_back(to_token_ids(entry, "input_ids"));
    } else {
      prompts.push_back(to_token_ids(*ids, "input_ids"));
    }
  } else {
    asked.list = fields.get("text") != nullptr && fields.get("text")->is_array();
    for (const std::string& text : fields.strings("text"))
      prompts.push_back(encode_prompt(*model.tokenizer, text));
  }
  if (prompts.empty()) fields.fail("text", "is missing, and so is input_ids");
  if (static_cast<std::int64_t>(prompts.size()) > kMostPrompts)
    fields.fail("text", fmt::format("has more than {} entries", kMostPrompts));
  const auto max_tokens = sampling.integer("max_new_tokens", 0, kMostTokens);
  for (std::vector<std::int32_t>& prompt : prompts) {
    check_prompt(prompt, "text", model);
    engine::Request request = common;
    request.max_tokens = answer_tokens(max_tokens.value_or(128), "max_new_tokens",
                                       static_cast<std::int64_t>(prompt.size()), request, model);
    request.prompt = std::move(prompt);
    asked.requests.push_back(std::move(request));
  }
  check_size(asked, true, "max_new_tokens");  // each event has all of the text
  return asked;
}

}  // namespace basin::server
