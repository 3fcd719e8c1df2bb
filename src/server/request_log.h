// One structured line on stderr for every answered request, and counts of them. No prompt, answer or key is in either.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "engine/request.h"

namespace basin::server {

struct RequestRecord {
  std::string id;  // empty: none was given
  std::string path;
  int status = 200;
  bool stream = false;
  const char* finish = "";  // "stop", "length", "cancelled", "error"; empty: nothing was generated
  engine::Usage usage;
  engine::Times times;
  std::int64_t choices = 0;
};

class RequestLog {
 public:
  explicit RequestLog(bool quiet) : quiet_(quiet) {}

  /// Thread-safe. `path` is one of the server's own, or "other".
  void add(const RequestRecord& record);

  using Counts = std::map<std::pair<std::string, int>, std::int64_t>;  // by path and status
  Counts counts() const;

 private:
  bool quiet_;
  mutable std::mutex mutex_;
  Counts counts_;
};

}  // namespace basin::server
