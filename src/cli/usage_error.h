// What argv alone decides: the program ends with 2. Everything else that goes wrong is a plain Error and ends with 1.
#pragma once

#include <string>
#include <utility>

#include "basin/base/error.h"

namespace basin::cli {

class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message, std::string hint = {})
      : Error(ErrorCode::invalid_argument, message, std::move(hint)) {}
};

}  // namespace basin::cli
