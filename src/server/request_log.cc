#include "server/request_log.h"

#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

namespace basin::server {

void RequestLog::add(const RequestRecord& record) {
  std::string line;
  if (!quiet_) {
    char time[32];
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&now, &utc);
    std::strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%SZ", &utc);
    nlohmann::ordered_json object;
    object["time"] = time;
    if (!record.id.empty()) object["id"] = record.id;
    object["path"] = record.path;
    object["status"] = record.status;
    if (record.choices > 0) {
      object["stream"] = record.stream;
      object["choices"] = record.choices;
      object["finish"] = record.finish;
      object["prompt_tokens"] = record.usage.prompt_tokens;
      object["cached_tokens"] = record.usage.cached_tokens;
      object["completion_tokens"] = record.usage.completion_tokens;
      object["kept_tokens"] = record.usage.kept_tokens;
      object["preemptions"] = record.usage.preemptions;
      object["queue_us"] = record.times.started_us;
      object["first_token_us"] = record.times.first_token_us;
      object["total_us"] = record.times.finished_us;
    }
    line = object.dump() + "\n";
  }
  const std::lock_guard lock(mutex_);
  ++counts_[{record.path, record.status}];
  if (!line.empty()) std::fwrite(line.data(), 1, line.size(), stderr);
}

RequestLog::Counts RequestLog::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace basin::server
