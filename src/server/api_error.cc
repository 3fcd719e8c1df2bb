#include "server/api_error.h"

#include <nlohmann/json.hpp>

namespace basin::server {
namespace {

const char* type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 501:
      return "not_supported_error";
    case 503:
      return "unavailable_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

}  // namespace

ApiError api_error(ErrorCode code, const std::string& message) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::unsupported:
      return {400, message};
    case ErrorCode::cancelled:
      return {408, message, {}, "timeout"};
    default:
      return {500, message};
  }
}

nlohmann::ordered_json error_json(const ApiError& error) {
  nlohmann::ordered_json body;
  body["message"] = error.message();
  body["type"] = type_of(error.status());
  body["param"] = error.param().empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(error.param());
  body["code"] = error.code().empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(error.code());
  return {{"error", body}};
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response;
  response.status = error.status();
  // A message may quote what a client sent.
  response.body = error_json(error).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  if (error.status() == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status() == 429) response.headers.emplace_back("Retry-After", "1");
  return response;
}

}  // namespace basin::server
