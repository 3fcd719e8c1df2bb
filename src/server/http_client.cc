#include "server/http_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <chrono>
#include <limits>

#include "basin/base/error.h"

namespace basin::server {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

// What may stand in the first line and the headers of a request as it is.
bool plain(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c > ' ' && c < '\x7f'; });
}

bool is_port(std::string_view text) {
  unsigned number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= 1 && number <= 65535;
}

void check_size(std::size_t bytes, const char* what) {
  if (bytes > kMostReplyBytes)
    throw Error(ErrorCode::io,
                fmt::format("{} of the server is larger than {} MiB", what, kMostReplyBytes >> 20));
}

}  // namespace

HttpClient::HttpClient(const std::string& url, std::string key, const std::atomic<bool>* stop)
    : key_(std::move(key)), stop_(stop) {
  constexpr std::string_view kScheme = "http://";
  std::string_view rest = url;
  if (!rest.starts_with(kScheme)) {
    throw Error(ErrorCode::invalid_argument, fmt::format("'{}' is no URL that begins with http://", url),
                "for https put a proxy between");
  }
  rest.remove_prefix(kScheme.size());
  const std::size_t slash = rest.find('/');
  base_ = slash == std::string_view::npos ? "" : std::string(rest.substr(slash));
  while (base_.ends_with('/')) base_.pop_back();
  if (base_.ends_with("/v1")) base_.erase(base_.size() - 3);  // as other clients are given it
  rest = rest.substr(0, slash);
  const std::size_t bracket = rest.find(']');
  const std::size_t colon = rest.find(':', bracket == std::string_view::npos ? 0 : bracket);
  host_ = std::string(rest.substr(0, colon));
  port_ = colon == std::string_view::npos ? "80" : std::string(rest.substr(colon + 1));
  if (host_.empty()) throw Error(ErrorCode::invalid_argument, fmt::format("'{}' names no host", url));
  if (!plain(url))
    throw Error(ErrorCode::invalid_argument, fmt::format("'{}' is no URL: it has spaces or such", url));
  if (!is_port(port_))
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}' names port '{}'; a port is 1 to 65535", url, port_));
  if (!plain(key_))
    throw Error(ErrorCode::invalid_argument,
                "the key has spaces, or characters that are not ASCII; no header can carry it");
}

HttpReply HttpClient::request(const std::string& method, const std::string& path, const std::string& body,
                              const std::function<bool(std::string_view)>& on_data) const {
  const auto check = [&](const error_code& error, const char* what) {
    if (error)
      throw Error(ErrorCode::io,
                  fmt::format("cannot {} http://{}:{}: {}", what, host_, port_, error.message()));
  };
  asio::io_context io;
  tcp::resolver resolver(io);
  tcp::socket socket(io);
  error_code error;
  const auto check_stop = [&] {
    if (stop_ != nullptr && stop_->load()) throw Error(ErrorCode::cancelled, "interrupted");
  };
  // Begins an operation and waits for its end, but not for ever once all shall stop.
  const auto wait_for = [&](const auto& begin) {
    bool ended = false;
    begin([&](const error_code& result, const auto&...) {
      error = result;
      ended = true;
    });
    io.restart();
    while (!ended) {
      io.run_one_for(std::chrono::milliseconds(100));
      if (!ended && stop_ != nullptr && stop_->load()) {
        error_code ignored;
        socket.close(ignored);
        io.run();  // its handler refers to what is here
      }
    }
    check_stop();
  };
  const bool literal = host_.starts_with('[');
  const auto found = resolver.resolve(literal ? host_.substr(1, host_.size() - 2) : host_, port_, error);
  check(error, "find");
  wait_for([&](const auto& end) { asio::async_connect(socket, found, end); });
  check(error, "connect to");
  socket.set_option(tcp::no_delay(true), error);

  http::request<http::string_body> request;
  request.method_string(method);
  request.target(base_ + path);
  request.set(http::field::host, fmt::format("{}:{}", host_, port_));
  request.set(http::field::connection, "close");
  if (!key_.empty()) request.set(http::field::authorization, "Bearer " + key_);
  if (!body.empty()) request.set(http::field::content_type, "application/json");
  request.body() = body;
  request.prepare_payload();
  wait_for([&](const auto& end) { http::async_write(socket, request, end); });
  check(error, "write to");

  beast::flat_buffer buffer;
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(std::numeric_limits<std::uint64_t>::max());
  wait_for([&](const auto& end) { http::async_read_header(socket, buffer, parser, end); });
  check(error, "read from");
  HttpReply reply;
  reply.status = static_cast<int>(parser.get().result_int());
  std::array<char, 16384> bytes;
  while (!parser.is_done()) {
    parser.get().body().data = bytes.data();
    parser.get().body().size = bytes.size();
    wait_for([&](const auto& end) { http::async_read_some(socket, buffer, parser, end); });
    if (error == http::error::need_buffer) error = {};
    check(error, "read from");
    const std::string_view got(bytes.data(), bytes.size() - parser.get().body().size);
    if (!on_data || reply.status != 200) {
      reply.body += got;
      check_size(reply.body.size(), "an answer");
    } else if (!got.empty() && !on_data(got)) {
      break;
    }
  }
  return reply;
}

bool EventReader::push(std::string_view bytes, const std::function<bool(std::string_view)>& on_event) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    line_ += bytes.substr(0, end);
    check_size(line_.size() + (data_ ? data_->size() : 0), "an event");
    if (end == std::string_view::npos) return true;
    bytes.remove_prefix(end + 1);
    if (!take_line(on_event)) return false;
  }
  return true;
}

// An empty line ends an event; lines of data are its lines, and all others (comments, names) say nothing here.
bool EventReader::take_line(const std::function<bool(std::string_view)>& on_event) {
  std::string_view line = line_;
  if (line.ends_with('\r')) line.remove_suffix(1);
  bool go_on = true;
  if (line.empty()) {
    const std::optional<std::string> data = std::exchange(data_, {});
    if (data) go_on = on_event(*data);
  } else if (constexpr std::string_view kData = "data:"; line.starts_with(kData)) {
    line.remove_prefix(kData.size());
    if (line.starts_with(' ')) line.remove_prefix(1);
    if (data_) {
      *data_ += '\n';
      *data_ += line;
    } else {
      data_ = std::string(line);
    }
  }
  line_.clear();
  return go_on;
}

}  // namespace basin::server
