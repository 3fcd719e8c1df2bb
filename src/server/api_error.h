// What is wrong with a request, in the form that OpenAI's clients read.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "basin/base/error.h"
#include "server/http.h"

namespace basin::server {

class ApiError : public std::runtime_error {
 public:
  ApiError(int status, const std::string& message, std::string param = {}, std::string code = {})
      : std::runtime_error(message),
        status_(status),
        message_(message),
        param_(std::move(param)),
        code_(std::move(code)) {}

  int status() const { return status_; }
  /// All of it: what() ends at a NUL byte, and a client may have sent one that is quoted here.
  const std::string& message() const { return message_; }
  const std::string& param() const { return param_; }  // the field at fault; empty = none
  const std::string& code() const { return code_; }    // a word for programs; empty = none

 private:
  int status_;
  std::string message_, param_, code_;
};

/// The same for an error of the engine.
ApiError api_error(ErrorCode code, const std::string& message);

nlohmann::ordered_json error_json(const ApiError& error);
HttpResponse error_response(const ApiError& error);

}  // namespace basin::server
