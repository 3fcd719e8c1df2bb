#include "server/http.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <csignal>
#include <mutex>
#include <optional>
#include <unordered_set>

#include "basin/base/error.h"

namespace basin::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

class Connection;

}  // namespace

struct HttpServer::State : std::enable_shared_from_this<HttpServer::State> {
  State(const HttpOptions& the_options, Handler the_handler, HeaderCheck the_header_check,
        ErrorBody the_error_body)
      : options(the_options),
        handler(std::move(the_handler)),
        header_check(std::move(the_header_check)),
        error_body(std::move(the_error_body)),
        acceptor(io),
        retry(io),
        signals(io) {}

  void listen();
  void accept();
  void wait_for_signal();
  void drain();
  void stop();
  void closed(Connection* connection);

  HttpOptions options;
  Handler handler;
  HeaderCheck header_check;
  ErrorBody error_body;
  asio::io_context io{1};
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  asio::signal_set signals;
  std::function<void(int)> on_signal;
  tcp::endpoint endpoint;
  std::unordered_set<Connection*> connections;
  bool draining = false;
};

namespace {

std::string status_line(int status) {
  return fmt::format("HTTP/1.1 {} {}\r\n", status,
                     std::string(http::obsolete_reason(static_cast<http::status>(status))));
}

// What stands before the query, with %XX read as the byte that it is.
std::string path_of(std::string_view target) {
  const std::string_view written = target.substr(0, target.find('?'));
  std::string path;
  for (std::size_t i = 0; i < written.size(); ++i) {
    unsigned char byte = 0;
    const char* const digits = written.data() + i + 1;
    const bool escaped = written[i] == '%' && i + 2 < written.size() &&
                         std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2;
    path += escaped ? static_cast<char>(byte) : written[i];
    if (escaped) i += 2;
  }
  return path;
}

// A request target in the form that proxies are sent: http://HOST/PATH?QUERY.
struct AbsoluteForm {
  std::string_view host, rest;  // the rest may lack its first slash
};

std::optional<AbsoluteForm> absolute_form(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (lower_case(target.substr(0, scheme.size())) != scheme) continue;
    target.remove_prefix(scheme.size());
    const std::size_t end = std::min(target.find_first_of("/?"), target.size());
    return AbsoluteForm{target.substr(0, end), target.substr(end)};
  }
  return {};
}

HttpRequest request_of(const auto& header) {
  HttpRequest request;
  request.method = std::string(header.method_string());
  const std::string_view target(header.target().data(), header.target().size());
  const auto absolute = absolute_form(target);
  request.path = path_of(absolute ? absolute->rest : target);
  if (absolute && !request.path.starts_with('/')) request.path.insert(0, 1, '/');
  // Who names a host in the target means that one, whatever the header says (RFC 9112, 3.2.2).
  if (absolute) request.headers.emplace_back("host", absolute->host);
  for (const auto& field : header) {
    if (absolute && field.name() == http::field::host) continue;
    request.headers.emplace_back(lower_case(field.name_string()), field.value());
  }
  return request;
}

// One client. All of it runs on the server's thread, but for the mail of exchanges.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<HttpServer::State> server, tcp::socket socket)
      : server_(std::move(server)), stream_(std::move(socket)) {}

  void start() {
    error_code ignored;
    stream_.socket().non_blocking(true, ignored);
    read_header();
  }

  void drain() {
    draining_ = true;
    if (!exchange_) close();
  }

  void close() {
    if (closed_) return;
    closed_ = true;
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
    stream_.close();
    client_gone();
    server_->closed(this);
  }

 private:
  class Mail;

  void read_header() {
    parser_.emplace();
    parser_->header_limit(static_cast<std::uint32_t>(server_->options.max_header_bytes));
    parser_->body_limit(server_->options.max_body_bytes);
    if (buffer_.size() > 0) return read_header_bytes();
    // The time of a request begins with its first byte.
    limit(server_->options.idle_seconds, [](Connection& self) { self.close(); });
    stream_.socket().async_wait(tcp::socket::wait_read, [self = shared_from_this()](error_code error) {
      if (error || self->closed_) return self->close();
      self->read_header_bytes();
    });
  }

  // The stream's own limit would close the socket, and the client could not be told why.
  void limit(int seconds, void (*at_end)(Connection&)) {
    timer_.emplace(server_->io, std::chrono::seconds(seconds));
    timer_->async_wait([weak = weak_from_this(), at_end, number = ++limits_](error_code error) {
      const auto self = weak.lock();
      if (!error && self && !self->closed_ && self->limits_ == number) at_end(*self);
    });
  }

  void end_limit() {
    ++limits_;  // one that is over already may still be on its way
    timer_.reset();
  }

  void read_header_bytes() {
    late_ = false;
    limit(server_->options.read_seconds, [](Connection& self) {
      self.late_ = true;
      error_code ignored;
      self.stream_.socket().cancel(ignored);
    });
    skip_empty_lines();
  }

  // Some clients end a body with a line that is not part of it, and it stands before their next request (RFC 9112, 2.2).
  void skip_empty_lines() {
    static constexpr std::string_view kEmptyLine = "\r\n";
    const auto unread = [this] {
      return std::string_view(static_cast<const char*>(buffer_.data().data()), buffer_.size());
    };
    bool skipped = false;
    for (; unread().starts_with(kEmptyLine); skipped = true) buffer_.consume(kEmptyLine.size());
    if (skipped && unread().empty()) return read_header();  // it is idle again, not slow
    if (kEmptyLine.starts_with(unread())) {
      static constexpr std::size_t kFirstBytes = 4096;
      stream_.async_read_some(buffer_.prepare(kFirstBytes),
                              [self = shared_from_this()](error_code error, std::size_t bytes) {
                                if (self->closed_) return;
                                if (error || self->late_) return self->refuse(error);
                                self->buffer_.commit(bytes);
                                self->skip_empty_lines();
                              });
      return;
    }
    http::async_read_header(stream_, buffer_, *parser_,
                            [self = shared_from_this()](error_code error, std::size_t) {
                              if (self->closed_) return;
                              if (error || self->late_) return self->refuse(error);
                              self->read_body();
                            });
  }

  void read_body() {
    const auto& header = parser_->get();
    if (header.version() != 11 && header.version() != 10)
      return refuse(505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
    if (header.version() == 11 && header.count(http::field::host) != 1)
      return refuse(400, "a request has exactly one Host header");
    const auto absolute = absolute_form({header.target().data(), header.target().size()});
    if (absolute && absolute->host.empty()) return refuse(400, "the URL of a request names its host");
    // Where its body ends is unknown then, and what comes could pass for a request of its own (RFC 9112, 6.3).
    if (header.count(http::field::transfer_encoding) > 0 && !parser_->chunked())
      return refuse(400, "the only Transfer-Encoding known here is chunked");
    // HTTP/1.0 has no expectations (RFC 9110, 10.1.1).
    const bool expects = header.version() == 11 && header.count(http::field::expect) > 0;
    const auto expected = header.equal_range(http::field::expect);
    const bool known = std::all_of(expected.first, expected.second, [](const auto& field) {
      return beast::iequals(field.value(), "100-continue");
    });
    if (expects && !known) return refuse(417, "the only Expect known here is 100-continue");
    const auto length = parser_->content_length();
    if (length && *length > server_->options.max_body_bytes) return refuse_large_body();
    if (!parser_->is_done()) {
      if (const auto refusal = server_->header_check(request_of(header))) {
        keep_alive_ = false;
        is_head_ = header.method() == http::verb::head;
        return begin_answer(*refusal);
      }
    }
    if (expects && !parser_->is_done()) {
      static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      asio::async_write(stream_, asio::buffer(kContinue),
                        [self = shared_from_this()](error_code error, std::size_t) {
                          if (error || self->closed_) return self->close();
                          self->read_body_bytes();
                        });
      return;
    }
    read_body_bytes();
  }

  void read_body_bytes() {
    http::async_read(stream_, buffer_, *parser_, [self = shared_from_this()](error_code error, std::size_t) {
      if (self->closed_) return;
      if (error || self->late_) return self->refuse(error);
      self->handle();
    });
  }

  void handle();

  void refuse(error_code error) {
    if (late_)
      return refuse(408,
                    fmt::format("the request did not come within {} seconds", server_->options.read_seconds));
    if (error == http::error::end_of_stream || error == asio::error::eof ||
        error == asio::error::connection_reset || error == http::error::partial_message ||
        error == asio::error::operation_aborted)
      return close();
    if (error == http::error::body_limit) return refuse_large_body();
    if (error == http::error::header_limit) {
      return refuse(
          431, fmt::format("the headers of a request may have {} bytes", server_->options.max_header_bytes));
    }
    refuse(400, "this is no HTTP request: " + error.message());
  }

  void refuse_large_body() {
    refuse(413, fmt::format("the body of a request may have {} bytes", server_->options.max_body_bytes));
  }

  // What is left of the request is not worth reading, so the connection ends with the answer.
  void refuse(int status, std::string_view message) {
    keep_alive_ = false;
    HttpResponse response;
    response.status = status;
    response.body = server_->error_body(status, message);
    begin_answer(response);
  }

  void begin_answer(const HttpResponse& response) {
    end_limit();
    answered_ = true;
    complete_ = true;
    out_ += head(response.status, response.content_type, response.headers);
    out_ += fmt::format("Content-Length: {}\r\n\r\n", response.body.size());
    if (!is_head_) out_ += response.body;
    write();
  }

  std::string head(int status, std::string_view content_type,
                   const std::vector<std::pair<std::string, std::string>>& headers) const {
    std::string text = status_line(status);
    text += fmt::format("Content-Type: {}\r\nX-Content-Type-Options: nosniff\r\n", content_type);
    for (const auto& [name, value] : headers) text += fmt::format("{}: {}\r\n", name, value);
    if (!keep_alive_) text += "Connection: close\r\n";
    return text;
  }

  void read_mail();
  void client_gone();

  void write() {
    if (writing_ || closed_) return;
    if (out_.empty()) {
      if (complete_) next();
      return;
    }
    writing_ = true;
    sending_ = std::exchange(out_, {});
    write_now();
  }

  // A socket nearly always takes an event at once, without a timer and a turn of the loop, which cost as much as the event. What
  // comes in the meantime comes with mail of its own.
  void write_now() {
    error_code error;
    sent_ = stream_.socket().write_some(asio::buffer(sending_), error);
    if (error && error != asio::error::would_block) return close();
    if (sent_ < sending_.size()) return write_some();
    writing_ = false;
    if (complete_) next();
  }

  // By parts, so that the time limit is one of progress.
  void write_some() {
    stream_.expires_after(std::chrono::seconds(server_->options.write_seconds));
    const auto rest = asio::buffer(sending_) + sent_;
    stream_.async_write_some(rest, [self = shared_from_this()](error_code error, std::size_t bytes) {
      if (self->closed_) return;
      if (error) return self->close();
      self->sent_ += bytes;
      if (self->sent_ < self->sending_.size()) return self->write_some();
      self->stream_.expires_never();
      self->writing_ = false;
      self->read_mail();
      self->write();
    });
  }

  // The answer is out: on to the next request of this client.
  void next() {
    end_exchange();
    answered_ = complete_ = false;
    if (!keep_alive_ || draining_ || server_->draining) return finish_connection();
    // A write may still be on the stack; and the watch is cancelled before anything is read.
    error_code ignored;
    stream_.socket().cancel(ignored);
    asio::post(server_->io, [self = shared_from_this()] {
      if (!self->closed_) self->read_header();
    });
  }

  // Closing with unread bytes would reset the connection and might take the answer along, so they are read first.
  void finish_connection() {
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream_.expires_after(std::chrono::seconds(2));  // of all of it
    linger_ = 64;
    read_rest();
  }

  void read_rest() {
    if (linger_-- == 0) return close();
    rest_.resize(64 << 10);
    stream_.async_read_some(asio::buffer(rest_), [self = shared_from_this()](error_code error, std::size_t) {
      if (self->closed_) return;
      if (error) return self->close();
      self->read_rest();
    });
  }

  // While an answer is being made nothing is read; a client that has gone is known by the end of its side.
  void watch() {
    stream_.socket().async_wait(
        tcp::socket::wait_read, [self = shared_from_this(), watched = exchange_](error_code error) {
          if (error || self->closed_ || self->exchange_ != watched || !watched) return;
          char byte = 0;
          const auto got = ::recv(self->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
          if (got > 0) return self->watch_behind();  // the next request is here already and can wait
          if (got < 0 && errno == EAGAIN) return self->watch();
          self->close();
        });
  }

  // Bytes that wait hide the end behind them from a read, but not from poll().
  void watch_behind() {
    behind_.emplace(server_->io, std::chrono::milliseconds(100));
    behind_->async_wait([weak = weak_from_this(), watched = std::weak_ptr(exchange_)](error_code error) {
      const auto self = weak.lock();
      if (error || !self || self->closed_ || !self->exchange_ || self->exchange_ != watched.lock()) return;
      pollfd look{self->stream_.socket().native_handle(), POLLRDHUP, 0};
      if (::poll(&look, 1, 0) > 0) return self->close();
      self->watch_behind();
    });
  }

  void end_exchange();

  std::shared_ptr<HttpServer::State> server_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::optional<asio::steady_timer> timer_, behind_;
  std::uint64_t limits_ = 0;        // begun and ended
  std::shared_ptr<Mail> exchange_;  // the one that is being answered; may be null
  std::string out_, sending_, rest_;
  std::size_t sent_ = 0;
  int linger_ = 0;
  bool writing_ = false, closed_ = false, draining_ = false;
  bool late_ = false;  // the request that is being read has taken too long
  bool keep_alive_ = false, is_head_ = false, chunked_ = false;
  bool answered_ = false, complete_ = false;  // the answer has begun; all of it is in out_
};

// What other threads have to say, put down until the server's thread comes for it.
class Connection::Mail : public Exchange {
 public:
  Mail(std::shared_ptr<Connection> connection, std::shared_ptr<HttpServer::State> server)
      : connection_(std::move(connection)), server_(std::move(server)) {}

  void respond(HttpResponse response) override {
    post([&] {
      response_ = std::move(response);
      complete_ = true;
    });
  }
  void start_events() override {
    post([&] { events_started_ = true; });
  }
  void send(std::string events) override {
    post([&] {
      // One large event is no fault of the client's: what counts is what lies there beside it.
      largest_ = std::max(largest_, events.size());
      if (events_.size() + events.size() > server_->options.max_unsent_bytes + largest_) overflow_ = true;
      events_ += events;
    });
  }
  void finish() override {
    post([&] { complete_ = true; });
  }
  void on_gone(std::function<void()> callback) override {
    {
      const std::lock_guard lock(mutex_);
      if (!gone_) {
        if (connection_) on_gone_ = std::move(callback);
        return;
      }
    }
    callback();
  }

 private:
  friend class Connection;

  template <typename Change>
  void post(const Change& change) {
    std::shared_ptr<Connection> connection;
    {
      const std::lock_guard lock(mutex_);
      if (gone_ || !connection_) return;
      change();
      if (posted_) return;
      posted_ = true;
      connection = connection_;
    }
    asio::post(server_->io, [connection] {
      connection->read_mail();
      connection->write();
    });
  }

  std::mutex mutex_;
  std::shared_ptr<Connection> connection_;  // null once the exchange has ended
  std::shared_ptr<HttpServer::State> server_;
  std::optional<HttpResponse> response_;
  std::string events_;
  std::size_t largest_ = 0;  // of the events so far
  std::function<void()> on_gone_;
  bool events_started_ = false, complete_ = false, overflow_ = false, posted_ = false, gone_ = false;
};

void Connection::handle() {
  auto message = parser_->release();
  keep_alive_ = message.keep_alive();
  is_head_ = message.method() == http::verb::head;
  chunked_ = message.version() == 11;
  HttpRequest request = request_of(message);
  request.body = std::move(message.body());
  end_limit();
  exchange_ = std::make_shared<Mail>(shared_from_this(), server_);
  watch();
  server_->handler(std::move(request), exchange_);
}

void Connection::read_mail() {
  if (closed_ || !exchange_) return;
  Mail& mail = *exchange_;
  bool overflow = false;
  std::optional<HttpResponse> response;
  {
    const std::lock_guard lock(mail.mutex_);
    mail.posted_ = false;
    if (!answered_) response = std::exchange(mail.response_, {});
    if (!mail.events_started_ && !response) return;
    if (!answered_ && !response) {
      answered_ = true;
      if (!chunked_) keep_alive_ = false;
      out_ += head(200, "text/event-stream; charset=utf-8", {{"Cache-Control", "no-cache"}});
      out_ += chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
    }
    overflow = mail.overflow_;
    // What the socket does not take stays in the mail, where it is counted.
    if (!writing_ && !mail.events_.empty()) {
      out_ += chunked_ ? fmt::format("{:x}\r\n{}\r\n", mail.events_.size(), mail.events_) : mail.events_;
      mail.events_.clear();
    }
    if (!response && mail.complete_ && mail.events_.empty() && !complete_) {
      complete_ = true;
      if (chunked_) out_ += "0\r\n\r\n";
    }
  }
  if (response) return begin_answer(*response);
  if (overflow) close();
}

void Connection::client_gone() {
  if (!exchange_) return;
  std::function<void()> callback;
  {
    const std::lock_guard lock(exchange_->mutex_);
    exchange_->gone_ = true;
    exchange_->connection_.reset();
    callback = std::exchange(exchange_->on_gone_, {});
  }
  exchange_.reset();
  if (callback) callback();
}

void Connection::end_exchange() {
  const std::shared_ptr<Mail> ended = std::exchange(exchange_, nullptr);
  if (!ended) return;
  std::function<void()> dropped;  // whatever it owns goes after the lock
  const std::lock_guard lock(ended->mutex_);
  ended->connection_.reset();
  dropped = std::exchange(ended->on_gone_, {});
}

}  // namespace

void HttpServer::State::listen() {
  error_code error;
  asio::ip::address address = asio::ip::make_address(options.host, error);
  if (error) {
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(options.host, "", tcp::resolver::passive, error);
    if (error || found.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--host {} is no address of this machine", options.host),
                  "127.0.0.1 is this machine alone, 0.0.0.0 all its networks");
    }
    address = found.begin()->endpoint().address();
  }
  endpoint = tcp::endpoint(address, options.port);
  const auto check = [&](const char* what) {
    if (!error) return;
    throw Error(
        ErrorCode::io, fmt::format("cannot {} {}:{}: {}", what, options.host, options.port, error.message()),
        error == asio::error::address_in_use ? "another server has the port; --port 0 takes a free one" : "");
  };
  acceptor.open(endpoint.protocol(), error);
  check("open a socket for");
  acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  acceptor.bind(endpoint, error);
  check("bind to");
  acceptor.listen(1024, error);
  check("listen on");
  endpoint = acceptor.local_endpoint();
}

void HttpServer::State::accept() {
  if (draining) return;
  const auto later = [this] {
    retry.expires_after(std::chrono::milliseconds(50));
    retry.async_wait([self = shared_from_this()](error_code error) {
      if (!error) self->accept();
    });
  };
  if (connections.size() >= options.max_connections) return later();  // the others wait in the system's queue
  acceptor.async_accept([self = shared_from_this(), later](error_code error, tcp::socket socket) {
    if (self->draining || error == asio::error::operation_aborted) return;
    if (error) return later();  // out of descriptors, for now
    error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    const auto connection = std::make_shared<Connection>(self, std::move(socket));
    self->connections.insert(connection.get());
    connection->start();
    self->accept();
  });
}

void HttpServer::State::wait_for_signal() {
  signals.async_wait([self = shared_from_this()](error_code error, int number) {
    if (error) return;
    if (self->on_signal) self->on_signal(number);
    self->wait_for_signal();
  });
}

void HttpServer::State::drain() {
  if (draining) return;
  draining = true;
  error_code ignored;
  acceptor.close(ignored);
  retry.cancel();
  for (Connection* connection : std::vector<Connection*>(connections.begin(), connections.end()))
    connection->shared_from_this()->drain();
  if (connections.empty()) io.stop();
}

void HttpServer::State::stop() {
  draining = true;
  error_code ignored;
  acceptor.close(ignored);
  for (Connection* connection : std::vector<Connection*>(connections.begin(), connections.end()))
    connection->shared_from_this()->close();
  io.stop();
}

void HttpServer::State::closed(Connection* connection) {
  connections.erase(connection);
  if (draining && connections.empty()) io.stop();
}

std::string lower_case(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

const std::string* HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return &value;
  }
  return nullptr;
}

HttpServer::HttpServer(const HttpOptions& options, Handler handler, HeaderCheck header_check,
                       ErrorBody error_body)
    : state_(std::make_shared<State>(options, std::move(handler), std::move(header_check),
                                     std::move(error_body))) {
  state_->listen();
}

HttpServer::~HttpServer() {
  state_->stop();
  // What is still on its way holds the state, which holds it: let it run out.
  state_->io.restart();
  state_->io.poll();
}

const std::string& HttpServer::host() const {
  return state_->options.host;
}

std::uint16_t HttpServer::port() const {
  return state_->endpoint.port();
}

bool HttpServer::loopback() const {
  return state_->endpoint.address().is_loopback();
}

std::size_t HttpServer::connections() const {
  return state_->connections.size();
}

void HttpServer::hold_signals() {
  state_->signals.add(SIGTERM);
  state_->signals.add(SIGINT);
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) state_->signals.add(SIGHUP);  // else nohup wants it to go on
}

void HttpServer::run(std::function<void(int)> on_signal) {
  state_->on_signal = std::move(on_signal);
  hold_signals();
  state_->wait_for_signal();
  state_->accept();
  state_->io.run();
}

void HttpServer::drain() {
  asio::post(state_->io, [state = state_] { state->drain(); });
}

void HttpServer::stop() {
  asio::post(state_->io, [state = state_] { state->stop(); });
}

}  // namespace basin::server
