#include "server/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string_view>

#include "engine/model_runner.h"
#include "models/cache.h"
#include "server/answer.h"
#include "server/metrics_text.h"
#include "server/page.h"

namespace basin::server {
namespace {

constexpr std::array<std::string_view, 10> kGets = {
    "/",        "/health",         "/ready",           "/v1/models", "/metrics", "/tokenizer_info",
    "/version", "/get_model_info", "/get_server_info", "/v1/models/"};
constexpr std::array<std::string_view, 6> kPosts = {
    "/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/flush_cache"};

bool among(auto& list, std::string_view path) {
  return std::ranges::find(list, path) != list.end();
}

HttpResponse json_response(const Json& body) {
  HttpResponse response;
  response.body = body.dump(-1, ' ', false, Json::error_handler_t::replace);
  return response;
}

// Takes the same time wherever the two differ.
bool equal_secrets(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0u : 1u;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const char other = b.empty() ? '\0' : b[i % b.size()];
    difference |= static_cast<unsigned>(static_cast<unsigned char>(a[i] ^ other));
  }
  return difference == 0;
}

bool is_number(std::string_view text, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= most;
}

// 127.0.0.0/8, as a browser writes it.
bool is_loopback_address(std::string_view name) {
  if (!name.starts_with("127.")) return false;
  for (int dots = 3; dots >= 0; --dots) {
    const std::size_t dot = dots > 0 ? name.find('.') : name.size();
    if (dot == std::string_view::npos || !is_number(name.substr(0, dot), 255)) return false;
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return true;
}

// Whether a Host header, HOST or HOST:PORT, names this machine in a way that no other can be given.
bool is_own_host(std::string_view host) {
  const std::size_t colon = host.starts_with('[') ? host.find(':', host.find(']')) : host.find(':');
  if (colon != std::string_view::npos && !is_number(host.substr(colon + 1), 65535)) return false;
  const std::string name = lower_case(host.substr(0, colon));
  return name == "localhost" || name == "[::1]" || is_loopback_address(name);
}

// Whether a page that a browser has from `origin` is one of this machine's. Pages of other sites are http, https or null.
bool is_own_origin(std::string_view origin) {
  if (origin == "null") return false;
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (origin.starts_with(scheme)) return is_own_host(origin.substr(scheme.size()));
  }
  return true;
}

bool is_json(const std::string* content_type) {
  if (content_type == nullptr) return false;
  std::string_view type = std::string_view(*content_type).substr(0, content_type->find(';'));
  while (type.ends_with(' ')) type.remove_suffix(1);
  return lower_case(type) == "application/json";
}

Json model_json(const ModelInfo& model) {
  const kv::Policy usual{model.defaults.sink_tokens, model.defaults.window.value_or(0), true};
  return {{"id", model.name},
          {"object", "model"},
          {"created", model.created},
          {"owned_by", "basin"},
          {"root", model.path},
          {"max_model_len",
           usual.window == 0 || model.max_model_len > 0 ? model.most_tokens(usual) : model.config->context}};
}

Json tokenize(const nlohmann::json& body, const ModelInfo& model) {
  const Fields fields(body);
  auto text = fields.string("prompt");
  if (!text) text = fields.string("text");
  if (!text) fields.fail("prompt", "is missing");
  const std::vector<std::int32_t> ids = fields.boolean("add_special_tokens").value_or(true)
                                            ? encode_prompt(*model.tokenizer, *text)
                                            : model.tokenizer->encode(*text, true);
  return {{"tokens", ids}, {"count", ids.size()}, {"max_model_len", model.config->context}};
}

Json detokenize(const nlohmann::json& body, const ModelInfo& model) {
  const Fields fields(body);
  if (fields.get("tokens") == nullptr) fields.fail("tokens", "is missing");
  const std::vector<std::int32_t> ids = fields.token_ids("tokens");
  for (const std::int32_t id : ids) {
    if (id >= model.tokenizer->vocabulary())
      fields.fail("tokens", fmt::format("has {}; the vocabulary has {}", id, model.tokenizer->vocabulary()));
  }
  const bool special = !fields.boolean("skip_special_tokens").value_or(false);
  return {{"prompt", model.tokenizer->decode(ids, special)}};
}

Json tokenizer_info(const ModelInfo& model) {
  const text::Tokenizer& tokenizer = *model.tokenizer;
  Json info;
  info["vocab_size"] = tokenizer.vocabulary();
  info["model_max_length"] = model.config->context;
  info["bos_token"] = tokenizer.bos() ? Json(tokenizer.token_bytes(*tokenizer.bos(), true)) : Json();
  info["eos_token"] =
      tokenizer.stops().empty() ? Json() : Json(tokenizer.token_bytes(tokenizer.stops().front(), true));
  info["add_bos_token"] = tokenizer.adds_bos();
  info["chat_template"] = model.chat_template.empty() ? Json() : Json(model.chat_template);
  return info;
}

}  // namespace

Service::Service(engine::Engine& engine, ModelInfo model, ServiceOptions options)
    : engine_(engine),
      model_(std::move(model)),
      options_(std::move(options)),
      log_(options_.quiet),
      page_bytes_(
          models::cache_shape(*model_.config, model_.defaults.compute, model_.page_tokens).page_bytes()),
      readers_(2) {}

std::string Service::error_body(int status, std::string_view message) {
  return error_response(ApiError(status, std::string(message))).body;
}

void Service::check_access(const HttpRequest& request) const {
  if (options_.check_host) {
    const std::string* host = request.header("host");
    if (host != nullptr && !is_own_host(*host))
      throw ApiError(403, "this server answers to localhost only; the Host header names another machine", {},
                     "wrong_host");
    const std::string* origin = request.header("origin");
    if (origin != nullptr && !is_own_origin(*origin))
      throw ApiError(403, "this server answers to pages of localhost only; the Origin header names another",
                     {}, "wrong_origin");
  }
  if (options_.api_key.empty() || request.path == "/health" || request.path == "/ready" ||
      request.path == "/")
    return;
  const std::string* given = request.header("authorization");
  constexpr std::string_view kBearer = "bearer ";
  std::string_view key;
  if (given != nullptr && given->size() > kBearer.size() &&
      std::ranges::equal(given->substr(0, kBearer.size()), kBearer,
                         [](unsigned char a, char b) { return std::tolower(a) == b; }))
    key = std::string_view(*given).substr(kBearer.size());
  if (!equal_secrets(key, options_.api_key))
    throw ApiError(401, "this server wants a key: Authorization: Bearer KEY", {}, "invalid_api_key");
}

std::optional<HttpResponse> Service::refusal(const HttpRequest& request) {
  HttpResponse response;
  try {
    check_access(request);
    const bool reads = request.method == "GET" || request.method == "HEAD";
    if (request.path == "/v1/responses")
      throw ApiError(501, "/v1/responses is not there; /v1/chat/completions is", {}, "not_implemented");
    const bool readable = among(kGets, request.path) || request.path.starts_with("/v1/models/");
    const bool writable = among(kPosts, request.path);
    if (!readable && !writable)
      throw ApiError(404, fmt::format("there is nothing at {}", request.path.substr(0, 100)), {},
                     "not_found");
    if (reads ? readable : request.method == "POST" && writable) {
      if (reads || request.path == "/flush_cache") return {};
      if (!is_json(request.header("content-type")))
        throw ApiError(415, "the body must be JSON, and say so: Content-Type: application/json", {},
                       "unsupported_media_type");
      const std::string* encoding = request.header("content-encoding");
      if (encoding == nullptr || lower_case(*encoding) == "identity") return {};
      throw ApiError(415, "the body must not be compressed: no Content-Encoding is known here", {},
                     "unsupported_media_type");
    }
    response = error_response(
        ApiError(405, fmt::format("{} wants {}", request.path.substr(0, 100), readable ? "GET" : "POST"), {},
                 "method_not_allowed"));
    response.headers.emplace_back("Allow", readable ? "GET, HEAD" : "POST");
  } catch (const ApiError& error) {
    response = error_response(error);
  }
  log_answer(request, response.status);
  return response;
}

void Service::log_answer(const HttpRequest& request, int status) {
  RequestRecord record;
  const bool known = among(kGets, request.path) || among(kPosts, request.path);
  record.path = known ? request.path : request.path.starts_with("/v1/models/") ? "/v1/models/" : "other";
  record.status = status;
  log_.add(record);
}

void Service::handle(HttpRequest request, const std::shared_ptr<Exchange>& exchange) {
  if (const auto wrong = refusal(request)) return exchange->respond(*wrong);
  const bool generates = request.path == "/v1/completions" || request.path == "/v1/chat/completions" ||
                         request.path == "/generate";
  if (generates && draining_) {
    return answer_with(request, exchange,
                       []() -> HttpResponse { throw ApiError(503, "the server is about to end"); });
  }
  if (request.method != "POST") return answer_with(request, exchange, [&] { return get(request.path); });
  // Reading a long body takes a while, which nobody else should wait for.
  const auto gone = std::make_shared<std::atomic<bool>>(false);
  exchange->on_gone([gone] { *gone = true; });
  readers_.post([this, request = std::make_shared<const HttpRequest>(std::move(request)), exchange, gone] {
    if (*gone) return;
    answer_with(*request, exchange, [&]() -> std::optional<HttpResponse> {
      if (request->path == "/flush_cache" || request->path.ends_with("tokenize")) return post(*request);
      generate(*request, exchange);
      return {};
    });
  });
}

// What `make` gives or throws. Nothing: the answer comes later.
void Service::answer_with(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
                          const std::function<std::optional<HttpResponse>()>& make) {
  std::optional<HttpResponse> response;
  try {
    response = make();
  } catch (const ApiError& error) {
    response = error_response(error);
  } catch (const Error& error) {
    response = error_response(api_error(error.code(), error.what()));
  } catch (const std::exception& error) {
    response = error_response(ApiError(500, error.what()));
  }
  if (!response) return;
  log_answer(request, response->status);
  exchange->respond(std::move(*response));
}

HttpResponse Service::get(const std::string& path) {
  if (path == "/") {
    HttpResponse response;
    response.content_type = "text/html; charset=utf-8";
    response.body = kPage;
    // It loads nothing and talks to this server alone.
    response.headers.emplace_back(
        "Content-Security-Policy",
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    return response;
  }
  if (path == "/health") return json_response({{"status", "ok"}});
  if (path == "/ready") {
    if (draining_) throw ApiError(503, "the server is about to end");
    return json_response({{"status", "ready"}});
  }
  if (path == "/metrics") {
    HttpResponse response;
    response.content_type = "text/plain; version=0.0.4; charset=utf-8";
    response.body = metrics_text(engine_.metrics(), log_.counts(), page_bytes_);
    return response;
  }
  if (path == "/version") return json_response({{"version", options_.version}});
  if (path == "/tokenizer_info") return json_response(tokenizer_info(model_));
  if (path == "/get_model_info") {
    return json_response(
        {{"model_path", model_.path}, {"tokenizer_path", model_.path}, {"is_generation", true}});
  }
  if (path == "/get_server_info") {
    const engine::Metrics metrics = engine_.metrics();
    return json_response({{"model_path", model_.path},
                          {"served_model_name", model_.name},
                          {"version", options_.version},
                          {"context", model_.config->context},
                          {"max_num_seqs", model_.max_sequences},
                          {"page_tokens", model_.page_tokens},
                          {"pages", model_.pages},
                          {"page_bytes", page_bytes_},
                          {"held_pages", metrics.pages_held},
                          {"sink_tokens", model_.defaults.sink_tokens},
                          {"window", model_.defaults.window ? Json(*model_.defaults.window) : Json()}});
  }
  if (path == "/v1/models")
    return json_response({{"object", "list"}, {"data", Json::array({model_json(model_)})}});
  const std::string name = path.substr(std::string_view("/v1/models/").size());
  if (name != model_.name)
    throw ApiError(404, fmt::format("the model '{}' is not served here", name.substr(0, 200)), "model",
                   "model_not_found");
  return json_response(model_json(model_));
}

HttpResponse Service::post(const HttpRequest& request) {
  if (request.path == "/flush_cache") {
    engine_.clear_prefix_cache();
    return json_response({{"status", "ok"}});
  }
  const nlohmann::json body = parse_object(request.body);
  return json_response(request.path == "/tokenize" ? tokenize(body, model_) : detokenize(body, model_));
}

void Service::generate(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange) {
  const nlohmann::json body = parse_object(request.body);
  const bool chat = request.path == "/v1/chat/completions", generate = request.path == "/generate";
  nlohmann::ordered_json tools;
  if (chat && body.contains("tools")) tools = parse_ordered(request.body)["tools"];
  Asked asked = chat       ? ask_chat(body, tools, model_)
                : generate ? ask_generate(body, model_)
                           : ask_completion(body, model_);
  const std::shared_ptr<Answer> answer =
      (chat       ? make_chat
       : generate ? make_generate
                  : make_completion)(std::move(asked), exchange, model_, log_);
  // Shared, because a failure may come before the numbers are known.
  struct Submitted {
    std::mutex mutex;
    std::vector<std::uint64_t> ids;
    bool cancelled = false;
  };
  const auto submitted = std::make_shared<Submitted>();
  const auto cancel = [submitted, &engine = engine_] {
    const std::lock_guard lock(submitted->mutex);
    submitted->cancelled = true;
    for (const std::uint64_t id : submitted->ids) engine.cancel(id);
  };
  answer->on_failure = cancel;
  std::vector<engine::Request> requests = answer->take_requests();
  for (std::size_t prompt = 0; prompt < requests.size(); ++prompt) {
    requests[prompt].on_event = [answer, prompt](engine::Event&& event) {
      answer->take(prompt, std::move(event));
    };
  }
  std::optional<std::vector<std::uint64_t>> ids;
  try {
    ids = engine_.submit(std::move(requests));
  } catch (const Error& error) {
    return answer->fail(api_error(error.code(), error.what()));
  } catch (const std::exception& error) {
    return answer->fail(ApiError(500, error.what()));
  }
  if (!ids)
    return answer->fail(ApiError(429, "too many requests wait here; try again later", {}, "queue_full"));
  {
    const std::lock_guard lock(submitted->mutex);
    submitted->ids = std::move(*ids);
    if (submitted->cancelled) {
      for (const std::uint64_t id : submitted->ids) engine_.cancel(id);
    }
  }
  exchange->on_gone(cancel);
}

}  // namespace basin::server
