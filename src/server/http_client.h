// A plain HTTP client that waits: for `basin chat --url` and `basin bench serve`.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace basin::server {

inline constexpr std::size_t kMostReplyBytes = 64 << 20;

struct HttpReply {
  int status = 0;
  std::string body;  // empty where on_data took it
};

class HttpClient {
 public:
  /// `url`: http://HOST[:PORT][/BASE]. `key`: may be empty. Requests end with Error(cancelled) once `*stop`; it may be null.
  /// Throws Error(invalid_argument).
  HttpClient(const std::string& url, std::string key, const std::atomic<bool>* stop = nullptr);

  /// Sends one request on a connection of its own. With `on_data`, what comes of a body of status 200 goes there as it comes;
  /// false breaks off. Throws Error(io | cancelled); io, too, when what is to be kept has more than kMostReplyBytes.
  HttpReply request(const std::string& method, const std::string& path, const std::string& body,
                    const std::function<bool(std::string_view)>& on_data = {}) const;

 private:
  std::string host_, port_, base_, key_;
  const std::atomic<bool>* stop_;
};

/// Cuts a stream of server-sent events into the data of each.
class EventReader {
 public:
  /// Calls `on_event` for every event that is complete now. False when it said so. Throws Error(io) when an event has more than
  /// kMostReplyBytes.
  bool push(std::string_view bytes, const std::function<bool(std::string_view data)>& on_event);

 private:
  bool take_line(const std::function<bool(std::string_view data)>& on_event);

  std::string line_;                 // so far
  std::optional<std::string> data_;  // of the event so far
};

}  // namespace basin::server
