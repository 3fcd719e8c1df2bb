// What the server says at which path.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "server/ask.h"
#include "server/http.h"
#include "server/model_info.h"
#include "server/readers.h"
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
  /// One request, on the server's thread. Bodies are read on threads of the service's own.
  void handle(HttpRequest request, const std::shared_ptr<Exchange>& exchange);
  /// From now on nothing new is taken on.
  void drain() { draining_ = true; }
  /// Bodies that have not been read are not read any more; afterwards nothing reaches the engine.
  void stop() { readers_.stop(); }

  static std::string error_body(int status, std::string_view message);

 private:
  void check_access(const HttpRequest& request) const;
  void log_answer(const HttpRequest& request, int status);
  void answer_with(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
                   const std::function<std::optional<HttpResponse>()>& make);
  HttpResponse get(const std::string& path);
  HttpResponse post(const HttpRequest& request);
  void generate(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange);

  engine::Engine& engine_;
  ModelInfo model_;
  ServiceOptions options_;
  RequestLog log_;
  std::int64_t page_bytes_;
  std::atomic<bool> draining_{false};
  Readers readers_;  // last: they use all of the above
};

}  // namespace basin::server
