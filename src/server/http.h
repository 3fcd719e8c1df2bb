// HTTP/1.1 without what is said over it. Only http.cc sees Boost.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace basin::server {

/// ASCII letters only, as in names of hosts, headers and media types.
std::string lower_case(std::string_view text);

struct HttpRequest {
  std::string method;  // "GET", "POST", ...
  std::string path;    // without the query and with no escapes
  std::string body;
  std::vector<std::pair<std::string, std::string>>
      headers;  // names in lower case; "host" is that of the target if it has one

  /// Of the first header of that lower-case name; null when there is none.
  const std::string* header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;  // further ones
};

/// One request that waits for its answer, from any thread. Either respond(), or start_events(), send()... and finish().
/// What comes after the client has gone is dropped.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void respond(HttpResponse response) = 0;
  /// Opens a stream of server-sent events.
  virtual void start_events() = 0;
  /// One or more whole events. A client that does not read them for too long, or too many of them, is dropped.
  virtual void send(std::string events) = 0;
  virtual void finish() = 0;
  /// `callback` runs once, on the server's thread, when the client goes before the answer is complete; at once if it has
  /// gone already. It is let go of when the exchange ends.
  virtual void on_gone(std::function<void()> callback) = 0;
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 8000;  // 0: any free one
  std::uint64_t max_header_bytes = 16 << 10;
  std::uint64_t max_body_bytes = 32 << 20;
  std::size_t max_unsent_bytes = 1 << 20;  // of one response's stream, beside its largest event
  std::size_t max_connections = 4096;
  int read_seconds = 30;   // for a request that has begun
  int idle_seconds = 120;  // between requests
  int write_seconds = 30;  // without any progress
};

class HttpServer {
 public:
  /// Runs on the server's thread, once for every request that is HTTP. Must not block.
  using Handler = std::function<void(HttpRequest, std::shared_ptr<Exchange>)>;
  /// Looks at a request whose body is still to come; what it gives is the answer, and the body is not read.
  using HeaderCheck = std::function<std::optional<HttpResponse>(const HttpRequest&)>;
  /// Gives the body of a refusal that HTTP itself makes (400, 408, 413, 431, 503).
  using ErrorBody = std::function<std::string(int status, std::string_view message)>;

  /// Binds and listens. Throws Error(io | invalid_argument).
  HttpServer(const HttpOptions& options, Handler handler, HeaderCheck header_check, ErrorBody error_body);
  ~HttpServer();

  const std::string& host() const;
  std::uint16_t port() const;
  bool loopback() const;

  /// From now on SIGTERM, SIGINT and SIGHUP (unless it is ignored) wait for run().
  void hold_signals();
  /// Serves on this thread until drain() has ended or stop() is called. Those signals call `on_signal` with their number.
  void run(std::function<void(int)> on_signal);
  /// Takes no more connections, answers what has come, and ends.
  void drain();
  void stop();

  std::size_t connections() const;

  struct State;  // http.cc

 private:
  std::shared_ptr<State> state_;
};

}  // namespace basin::server
