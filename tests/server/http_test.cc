// HTTP alone: what its clients see when they are slow, and when it notices that they have gone.
#include "server/http.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <thread>

namespace basin::test {
namespace {

using server::Exchange;
using server::HttpRequest;

class Client {
 public:
  explicit Client(std::uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ~Client() { ::close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(std::string_view bytes) {
    EXPECT_EQ(::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
  }
  std::string receive_all() {
    std::string all;
    char bytes[4096];
    for (ssize_t got = 0; (got = ::recv(socket_, bytes, sizeof bytes, 0)) > 0;)
      all.append(bytes, static_cast<std::size_t>(got));
    return all;
  }
  bool hears_nothing() {
    char byte = 0;
    return ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }

 private:
  int socket_;
};

// A server whose requests wait for ever, but for those of /now.
class Waiting {
 public:
  explicit Waiting(int read_seconds = 30) {
    server::HttpOptions options;
    options.port = 0;
    options.read_seconds = read_seconds;
    server_.emplace(
        options,
        [this](const HttpRequest& request, const std::shared_ptr<Exchange>& exchange) {
          if (request.path == "/now") return exchange->respond({});
          exchange->on_gone([this] { gone_.set_value(); });
          kept_ = exchange;
        },
        [](const HttpRequest&) { return std::optional<server::HttpResponse>(); },
        [](int status, std::string_view) { return std::to_string(status) + "!"; });
    thread_ = std::jthread([this] { server_->run([](int) {}); });
  }
  ~Waiting() { server_->stop(); }

  std::uint16_t port() const { return server_->port(); }
  bool sees_the_client_go() {
    return gone_.get_future().wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  }

 private:
  std::promise<void> gone_;
  std::shared_ptr<Exchange> kept_;
  std::optional<server::HttpServer> server_;
  std::jthread thread_;
};

TEST(Http, ASlowRequestIsToldSo) {
  Waiting waiting(1);
  for (const char* begun : {"G", "GET / HTTP/1.1\r\nHost: localhost\r\n",
                            "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nbod",
                            "GET /now HTTP/1.1\r\nHost: localhost\r\n\r\nGET /now HTTP/1.1\r\n"}) {
    Client client(waiting.port());
    client.send(begun);
    const std::string answer = client.receive_all();
    EXPECT_NE(answer.find("HTTP/1.1 408 Request Timeout\r\n"), std::string::npos) << begun << answer;
    EXPECT_TRUE(answer.ends_with("408!")) << answer;
  }
}

TEST(Http, AnAnswerMayTakeLongerThanItsRequest) {
  Waiting waiting(1);
  Client client(waiting.port());
  client.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_TRUE(client.hears_nothing());
  Client other(waiting.port());
  other.send("GET /now HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(other.receive_all().starts_with("HTTP/1.1 200"));
}

TEST(Http, AClientThatGoesIsNoticed) {
  // Also when it has sent more than its request: part of the next, or several more.
  const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  for (const std::string& more : {std::string(), std::string("G"), request + request}) {
    Waiting waiting;
    {
      Client client(waiting.port());
      client.send(request + more);
      std::this_thread::sleep_for(
          std::chrono::milliseconds(200));  // it has been read, and what follows waits
    }
    EXPECT_TRUE(waiting.sees_the_client_go()) << more;
  }
}

// Some clients end a body with a line that is not part of it (RFC 9112, 2.2).
TEST(Http, EmptyLinesBeforeARequestAreSkipped) {
  const std::string request = "GET /now HTTP/1.1\r\nHost: localhost\r\n";
  const std::string last = request + "Connection: close\r\n\r\n";
  Waiting waiting(1);
  const auto answers = [&](std::initializer_list<std::string> parts, std::chrono::milliseconds between) {
    Client client(waiting.port());
    for (const std::string& part : parts) {
      client.send(part);
      std::this_thread::sleep_for(between);
    }
    const std::string all = client.receive_all();
    int count = 0;
    for (std::size_t at = 0; (at = all.find("HTTP/1.1 200", at)) != std::string::npos; ++at) ++count;
    EXPECT_EQ(all.find("HTTP/1.1 4"), std::string::npos) << all;
    return count;
  };
  const std::chrono::milliseconds at_once(0), apart(50), longer_than_a_request_may_take(1300);
  EXPECT_EQ(answers({"\r\n" + last}, at_once), 1);
  EXPECT_EQ(answers({"\r\n\r\n" + request + "\r\n\r\n" + last}, at_once), 2);
  EXPECT_EQ(answers({"\r", "\n", last}, apart), 1);
  EXPECT_EQ(answers({request + "\r\n\r\n", last}, longer_than_a_request_may_take), 2);  // idle, not slow

  for (const char* other : {"\n", "\r", "\r\r\n"}) {
    Client client(waiting.port());
    client.send(other + last);
    EXPECT_TRUE(client.receive_all().starts_with("HTTP/1.1 400")) << other;
  }
}

}  // namespace
}  // namespace basin::test
