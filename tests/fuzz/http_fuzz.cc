// Whatever a client sends, the server stands, answers at once, and blames the client: 2xx or 4xx, and 501 and 505 for what
// it says that it has not. The first byte chooses an endpoint, and the rest is the body of a request to it; after bytes that
// choose none, the rest is what goes over the connection.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "engine/engine.h"
#include "engine/fake_runner.h"
#include "fuzz/memory_file.h"
#include "server/service.h"
#include "text/chat_cases.h"

namespace {

using basin::fuzz::require;

constexpr std::array<std::string_view, 6> kEndpoints = {
    "/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize", "/flush_cache"};
constexpr int kMostSeconds = 10;  // for an answer, before it counts as never

// A server as `basin serve` makes it, over a runner without a model, with little room for everything.
class Server {
 public:
  Server() : thread_([this] { http_.run([](int) { std::_Exit(130); }); }) {}
  ~Server() {
    http_.stop();
    thread_.join();
    service_.stop();
    engine_.stop();
  }

  std::uint16_t port() const { return http_.port(); }
  bool idle() const { return engine_.idle(); }

 private:
  static basin::models::ModelConfig config() {
    basin::models::ModelConfig config;
    config.architecture = "qwen3";
    config.vocabulary = tokenizer().vocabulary();
    config.h_q = config.h_kv = config.d_head = 1;
    config.context = 256;
    config.layers.resize(1);
    return config;
  }
  static const basin::text::Tokenizer& tokenizer() {
    static const basin::text::Tokenizer made = basin::text::byte_tokenizer(
        {"<|im_start|>", "<|im_end|>"}, {"<think>", "</think>", "<tool_call>", "</tool_call>"});
    return made;
  }
  basin::server::ModelInfo model() const {
    basin::server::ModelInfo model;
    model.name = model.path = "m";
    model.config = &config_;
    model.tokenizer = &tokenizer();
    model.chat = format_.get();
    model.max_model_len = 96;
    model.pages = kPages;
    model.max_sequences = 4;
    return model;
  }
  static basin::engine::EngineOptions engine_options() {
    basin::engine::EngineOptions options;
    options.batch.max_sequences = 4;
    options.batch.max_batch_tokens = 32;
    options.batch.check_each_step = true;
    options.max_waiting = 8;
    return options;
  }
  static basin::server::HttpOptions http_options() {
    basin::server::HttpOptions options;
    options.port = 0;
    options.max_header_bytes = 1 << 10;
    options.max_body_bytes = 2 << 10;
    return options;
  }
  static basin::server::ServiceOptions service_options() {
    basin::server::ServiceOptions options;
    options.quiet = true;
    return options;
  }

  static constexpr std::int64_t kPages = 64;
  const basin::models::ModelConfig config_ = config();
  const std::unique_ptr<basin::text::ChatFormat> format_ = basin::text::find_chat_format(
      tokenizer(),
      "<|im_start|><|im_end|></think>enable_thinking # Tools\\n\\nYou may call one or more functions",
      "qwen3");
  basin::test::FakeRunner runner_{tokenizer().vocabulary(), 16, kPages};
  basin::ThreadPool threads_{1};
  basin::engine::Engine engine_{runner_, threads_, &tokenizer(), engine_options()};
  basin::server::Service service_{engine_, model(), service_options()};
  basin::server::HttpServer http_{
      http_options(),
      [this](const basin::server::HttpRequest& request,
             const std::shared_ptr<basin::server::Exchange>& exchange) {
        service_.handle(request, exchange);
      },
      [this](const basin::server::HttpRequest& request) { return service_.refusal(request); },
      basin::server::Service::error_body};
  std::thread thread_;
};

class Client {
 public:
  explicit Client(std::uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval limit = {1, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  }
  ~Client() { ::close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Less than all of it when the server has heard enough.
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;  // libFuzzer has an alarm
      if (sent <= 0) return;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  void end() { ::shutdown(socket_, SHUT_WR); }
  // All that comes until the server closes; nothing when it has so much to compute that nobody would wait for it.
  std::optional<std::string> receive(const Server& server) {
    std::string all;
    std::array<char, 16 << 10> part{};
    for (int seconds = 0;;) {
      const ssize_t got = ::recv(socket_, part.data(), part.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) {
        if (!server.idle()) return {};
        require(++seconds < kMostSeconds);
        continue;
      }
      require(got >= 0 || errno == ECONNRESET);
      if (got <= 0) return all;
      all.append(part.data(), static_cast<std::size_t>(got));
    }
  }

 private:
  int socket_;
};

void check_status(std::string_view answer) {
  constexpr std::string_view kVersion = "HTTP/1.1 ";
  require(answer.starts_with(kVersion) && answer.size() > kVersion.size() + 3);
  const int status = std::atoi(std::string(answer.substr(kVersion.size(), 3)).c_str());
  require(status == 100 || (status >= 200 && status < 300) || (status >= 400 && status < 500) ||
          status == 501 || status == 505);
}

void check_whole(const std::string& answer) {
  check_status(answer);
  const std::size_t end = answer.find("\r\n\r\n");
  require(end != std::string::npos);
  const std::string_view head = std::string_view(answer).substr(0, end + 4),
                         body = std::string_view(answer).substr(end + 4);
  if (head.find("text/event-stream") != std::string_view::npos) {
    require(body.ends_with("0\r\n\r\n"));
    require(body.find("data: [DONE]\n\n") != std::string_view::npos);
  } else {
    require(head.find(fmt::format("\r\nContent-Length: {}\r\n", body.size())) != std::string_view::npos);
    require(nlohmann::json::accept(body));
  }
}

void wait_until_idle(const Server& server) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kMostSeconds);
  while (!server.idle()) {
    require(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const Server server;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  {
    Client client(server.port());
    if (data[0] < kEndpoints.size()) {
      client.send(fmt::format(
          "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
          "Content-Length: {}\r\n\r\n{}",
          kEndpoints[data[0]], rest.size(), rest));
      if (const auto answer = client.receive(server)) check_whole(*answer);
    } else {
      client.send(rest);
      client.end();  // a client that is gone, once its request is complete
      const auto answer = client.receive(server);
      if (answer && !answer->empty()) check_status(*answer);
    }
  }
  wait_until_idle(server);
  return 0;
}
