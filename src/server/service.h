// What the server says at which path.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "server/ask.h"
#include "server/http.h"
#include "server/model_info.h"
#include "server/request_log.h"

namespace basin::server {

struct ServiceOptions {
  std::string api_key;     // empty: nobody is asked for one
  bool check_host = true;  // Host must name this machine: a page of another site, resolved to it, is refused
  bool quiet = false;      // no line for each request
  std::string version;
};

class Service {
 public:
  /// `engine` must outlive the service.
  Service(engine::Engine& engine, ModelInfo model, ServiceOptions options);

  /// What is wrong with a request, whatever its body says.
  std::optional<HttpResponse> refusal(const HttpRequest& request);
  /// One request, on the server's thread.
  void handle(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange);
  /// From now on nothing new is taken on.
  void drain() { draining_ = true; }

  static std::string error_body(int status, std::string_view message);

 private:
  void check_access(const HttpRequest& request) const;
  void log_answer(const HttpRequest& request, int status);
  HttpResponse get(const std::string& path);
  HttpResponse post(const HttpRequest& request);
  void generate(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange);

  engine::Engine& engine_;
  ModelInfo model_;
  ServiceOptions options_;
  RequestLog log_;
  std::int64_t page_bytes_;
  std::atomic<bool> draining_{false};
};

}  // namespace basin::server
