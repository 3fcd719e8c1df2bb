// A plain HTTP client that waits: for `basin chat --url` and `basin bench serve`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace basin::server {

struct HttpReply {
  int status = 0;
  std::string body;  // empty where on_data took it
};

class HttpClient {
 public:
  /// `url`: http://HOST[:PORT][/BASE]. `key`: may be empty. Throws Error(invalid_argument).
  HttpClient(const std::string& url, std::string key);

  /// Sends one request on a connection of its own. With `on_data`, what comes of a body of status 200 goes there as it comes;
  /// false breaks off. Throws Error(io).
  HttpReply request(const std::string& method, const std::string& path, const std::string& body,
                    const std::function<bool(std::string_view)>& on_data = {}) const;

 private:
  std::string host_, port_, base_, key_;
};

/// Cuts a stream of server-sent events into the data of each.
class EventReader {
 public:
  /// Calls `on_event` for every event that is complete now. False when it said so.
  bool push(std::string_view bytes, const std::function<bool(std::string_view data)>& on_event);

 private:
  std::string rest_;
};

}  // namespace basin::server
