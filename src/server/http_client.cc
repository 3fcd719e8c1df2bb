#include "server/http_client.h"

#include <fmt/format.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <limits>

#include "basin/base/error.h"

namespace basin::server {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

HttpClient::HttpClient(const std::string& url, std::string key) : key_(std::move(key)) {
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
  if (host_.empty() || port_.empty())
    throw Error(ErrorCode::invalid_argument, fmt::format("'{}' names no host", url));
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
  const bool literal = host_.starts_with('[');
  const auto found = resolver.resolve(literal ? host_.substr(1, host_.size() - 2) : host_, port_, error);
  check(error, "find");
  asio::connect(socket, found, error);
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
  http::write(socket, request, error);
  check(error, "write to");

  beast::flat_buffer buffer;
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(std::numeric_limits<std::uint64_t>::max());
  http::read_header(socket, buffer, parser, error);
  check(error, "read from");
  HttpReply reply;
  reply.status = static_cast<int>(parser.get().result_int());
  std::array<char, 16384> bytes;
  while (!parser.is_done()) {
    parser.get().body().data = bytes.data();
    parser.get().body().size = bytes.size();
    http::read_some(socket, buffer, parser, error);
    if (error == http::error::need_buffer) error = {};
    check(error, "read from");
    const std::string_view got(bytes.data(), bytes.size() - parser.get().body().size);
    if (!on_data || reply.status != 200) {
      reply.body += got;
    } else if (!got.empty() && !on_data(got)) {
      break;
    }
  }
  return reply;
}

bool EventReader::push(std::string_view bytes, const std::function<bool(std::string_view)>& on_event) {
  rest_ += bytes;
  std::size_t begin = 0;
  for (std::size_t end = rest_.find("\n\n"); end != std::string::npos; end = rest_.find("\n\n", begin)) {
    const std::string_view event = std::string_view(rest_).substr(begin, end - begin);
    begin = end + 2;
    if (event.starts_with("data: ") && !on_event(event.substr(6))) return false;
  }
  rest_.erase(0, begin);
  return true;
}

}  // namespace basin::server
