// The one error type of Basin. The library never prints and never exits: it throws basin::Error.
//
//   throw Error(ErrorCode::unsupported, fmt::format("head size {} is not a multiple of 16", d_qk),
//               "use --device reference or a head size of 16, 32, ... 256");
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace basin {

enum class ErrorCode {
  invalid_argument,  // the caller broke a stated precondition
  unsupported,       // legal, but this build or backend does not have it
  not_found,         // a file, tensor, key or model is missing
  corrupt,           // a file contradicts its format
  io,                // the operating system refused a read or write
  cancelled,         // the user asked to stop
  internal,          // a bug in Basin
};

class Error : public std::runtime_error {
 public:
  /// `message` says what was given and what is allowed; `hint` (may be empty) says what to do about it.
  Error(ErrorCode code, const std::string& message, std::string hint = {},
        std::source_location where = std::source_location::current())
      : std::runtime_error(message), code_(code), hint_(std::move(hint)), where_(where) {}

  /// The same error, said of `where`: a file, for a check that knows the content only.
  Error in(const std::string& where) const { return Error(code_, where + ": " + what(), hint_, where_); }

  ErrorCode code() const { return code_; }
  const std::string& hint() const { return hint_; }
  const std::source_location& where() const { return where_; }

 private:
  ErrorCode code_;
  std::string hint_;
  std::source_location where_;
};

}  // namespace basin
