#include "server/metrics_text.h"

#include <fmt/format.h>

#include <iterator>

namespace basin::server {
namespace {

class Text {
 public:
  void metric(const char* name, const char* type, const char* help) {
    fmt::format_to(std::back_inserter(text_), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  template <typename Value>
  void sample(const std::string& name, Value value) {
    fmt::format_to(std::back_inserter(text_), "{} {}\n", name, value);
  }
  void one(const char* name, const char* type, const char* help, std::int64_t value) {
    metric(name, type, help);
    sample(name, value);
  }
  void histogram(const char* name, const char* help, const engine::Histogram& histogram) {
    metric(name, "histogram", help);
    std::int64_t below = 0;
    for (std::size_t i = 0; i < engine::Histogram::kBounds.size(); ++i) {
      below += histogram.counts()[i];
      sample(fmt::format("{}_bucket{{le=\"{}\"}}", name, engine::Histogram::kBounds[i]), below);
    }
    below += histogram.counts().back();
    sample(fmt::format("{}_bucket{{le=\"+Inf\"}}", name), below);
    sample(fmt::format("{}_sum", name), histogram.sum());
    sample(fmt::format("{}_count", name), below);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

}  // namespace

std::string metrics_text(const engine::Metrics& m, const RequestLog::Counts& requests,
                         std::int64_t page_bytes) {
  Text text;
  text.metric("basin_http_requests_total", "counter", "Answered HTTP requests.");
  for (const auto& [key, count] : requests)
    text.sample(fmt::format("basin_http_requests_total{{path=\"{}\",status=\"{}\"}}", key.first, key.second),
                count);
  text.metric("basin_choices_total", "counter", "Ended answers, by how they ended.");
  const std::pair<const char*, std::int64_t> ends[] = {{"stop", m.stopped},
                                                       {"length", m.reached_length},
                                                       {"cancelled", m.cancelled},
                                                       {"timeout", m.timed_out},
                                                       {"error", m.failed}};
  for (const auto& [reason, count] : ends)
    text.sample(fmt::format("basin_choices_total{{reason=\"{}\"}}", reason), count);
  text.one("basin_prompt_tokens_total", "counter", "Tokens of prompts.", m.prompt_tokens);
  text.one("basin_generated_tokens_total", "counter", "Tokens chosen.", m.generated_tokens);
  text.one("basin_computed_tokens_total", "counter",
           "Tokens that went through the model: without prefix hits, with replays.", m.computed_tokens);
  text.one("basin_prefix_cache_queried_tokens_total", "counter",
           "Prompt tokens looked up in the prefix cache.", m.prefix_queried_tokens);
  text.one("basin_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache.",
           m.prefix_hit_tokens);
  text.one("basin_preemptions_total", "counter",
           "Sequences that gave back their pages, to be copied in or computed again.", m.preemptions);
  text.one("basin_preempted_pages_copied_total", "counter",
           "Pages of windowed sequences that were copied out and not computed again.", m.copied_pages);
  text.one("basin_window_evicted_pages_total", "counter", "Pages that left the window of their sequence.",
           m.pages_left_window);
  text.one("basin_steps_total", "counter", "Passes of the model.", m.steps);
  text.one("basin_running_sequences", "gauge", "Sequences that hold pages.", m.running);
  text.one("basin_waiting_sequences", "gauge", "Sequences that wait for their start.", m.waiting);
  text.metric("basin_kv_pages", "gauge",
              "Pages of keys and values: held by sequences, kept for prefixes, free.");
  text.sample("basin_kv_pages{state=\"held\"}", m.pages_held);
  text.sample("basin_kv_pages{state=\"kept\"}", m.pages_idle);
  text.sample("basin_kv_pages{state=\"free\"}", m.pages - m.pages_held - m.pages_idle);
  text.one("basin_kv_shared_pages", "gauge", "Held pages with more than one owner.", m.pages_shared);
  text.one("basin_kv_held_bytes", "gauge", "Bytes of held pages.", m.pages_held * page_bytes);
  text.one("basin_kv_limit_bytes", "gauge", "Bytes of all pages there may be.", m.pages * page_bytes);
  text.histogram("basin_time_to_first_token_seconds", "From the arrival of a request to its first token.",
                 m.first_token);
  text.histogram("basin_inter_token_seconds", "Between two tokens of a sequence.", m.inter_token);
  text.histogram("basin_request_seconds", "From the arrival of a request to its end.", m.end_to_end);
  text.histogram("basin_queue_seconds", "From the arrival of a request to its start.", m.queue_time);
  text.histogram("basin_step_seconds", "One pass of the model, with scheduling and sampling.", m.step_time);
  return text.take();
}

}  // namespace basin::server
