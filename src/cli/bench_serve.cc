// basin bench serve: load on a server that speaks OpenAI's completions, and what its clients see.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/reply.h"
#include "server/http_client.h"

namespace basin::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

constexpr std::int64_t kUsualVocabulary = 20'000;  // few models have less

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// What one request's client saw.
struct Seen {
  bool ok = false;
  std::string problem;
  std::int64_t tokens = 0;
  double first_token = 0.0, whole = 0.0;  // seconds since it was sent
  std::vector<double> gaps;               // between the events that carried text
};

// Of a run with `seed`, for one of its texts: another seed or another text shares nothing with it, however near its number.
std::mt19937_64 random_of(std::uint64_t seed, std::int64_t text) {
  const auto number = static_cast<std::uint64_t>(text);
  std::seed_seq words{seed & 0xffffffff, seed >> 32, number & 0xffffffff, number >> 32};
  return std::mt19937_64(words);
}

// How many token ids the model has. llama.cpp tells it in its list of models, others in /tokenizer_info, and some nowhere.
std::int64_t vocabulary_of(const server::HttpClient& client, const nlohmann::json& models) {
  auto size = count_at(models, "/data/0/meta/n_vocab");
  if (!size) {
    const server::HttpReply info = client.request("GET", "/tokenizer_info", "");
    if (info.status == 200) size = count_at(nlohmann::json::parse(info.body, nullptr, false), "/vocab_size");
  }
  if (size && *size >= 2) return *size;
  print_note(
      fmt::format("note: the server does not say how many token ids its model has; prompts are of the first "
                  "{} (--vocabulary)",
                  kUsualVocabulary));
  return kUsualVocabulary;
}

std::string make_body(const BenchServeArgs& args, const std::string& model, std::int64_t vocabulary,
                      std::int64_t index) {
  // Not from the beginning, where some vocabularies have their special tokens.
  std::mt19937_64 shared = random_of(args.seed, -1), own = random_of(args.seed, index);
  std::uniform_int_distribution<std::int64_t> id(vocabulary / 10, vocabulary - 1);
  std::vector<std::int64_t> prompt;
  for (std::int64_t i = 0; i < args.shared_tokens; ++i) prompt.push_back(id(shared));
  for (std::int64_t i = 0; i < args.input_tokens; ++i) prompt.push_back(id(own));
  ordered_json body = {{"model", model},
                       {"prompt", prompt},
                       {"max_tokens", args.output_tokens},
                       {"temperature", 0},
                       {"ignore_eos", true},
                       {"stream", true},
                       {"stream_options", {{"include_usage", true}}}};
  if (args.window) {
    body["window"] = *args.window;
    body["sink_tokens"] = args.sink_tokens;
  }
  return body.dump();
}

Seen run_one(const server::HttpClient& client, const std::string& body) {
  Seen seen;
  const Clock::time_point start = Clock::now();
  Clock::time_point last = start;
  server::EventReader reader;
  bool done = false;
  const auto on_event = [&](std::string_view data) {
    if (data == "[DONE]") {
      done = true;
      return true;
    }
    const auto event = nlohmann::json::parse(data, nullptr, false);
    if (!event.is_object() || error_of(event)) {
      seen.problem = std::string(data.substr(0, 200));
      return false;
    }
    seen.tokens = count_at(event, "/usage/completion_tokens").value_or(seen.tokens);
    if (string_at(event, "/choices/0/text").value_or("") != "") {
      const Clock::time_point now = Clock::now();
      if (last == start) {
        seen.first_token = seconds_between(start, now);
      } else {
        seen.gaps.push_back(seconds_between(last, now));
      }
      last = now;
    }
    return true;
  };
  try {
    const server::HttpReply reply = client.request(
        "POST", "/v1/completions", body,
        [&](std::string_view bytes) { return reader.push(bytes, on_event) && !interrupt_flag()->load(); });
    if (reply.status != 200)
      seen.problem = fmt::format("status {}: {}", reply.status, reply.body.substr(0, 200));
  } catch (const std::exception& error) {
    seen.problem = error.what();
  }
  seen.whole = seconds_between(start, Clock::now());
  if (seen.problem.empty() && !done) seen.problem = "the stream ended without [DONE]";
  seen.ok = seen.problem.empty();
  return seen;
}

ordered_json quantiles(std::vector<double> values) {
  std::ranges::sort(values);
  ordered_json object;
  for (const auto& [name, share] : {std::pair{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}}) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
    object[name] =
        values.empty() ? ordered_json() : ordered_json(1e3 * values[std::max<std::size_t>(rank, 1) - 1]);
  }
  return object;
}

}  // namespace

int run(const BenchServeArgs& args) {
  const server::HttpClient client(args.url, client_key(args.api_key), interrupt_flag());
  const server::HttpReply models = client.request("GET", "/v1/models", "");
  const auto list = nlohmann::json::parse(models.body, nullptr, false);
  const auto named = string_at(list, "/data/0/id");
  if (models.status != 200 || !named) {
    throw Error(ErrorCode::io,
                fmt::format("{}/v1/models names no model (status {})", args.url, models.status));
  }
  const std::string& model = *named;
  const std::int64_t vocabulary = args.vocabulary ? *args.vocabulary : vocabulary_of(client, list);

  std::vector<Seen> all(static_cast<std::size_t>(args.requests));
  std::vector<double> send_at(all.size(), 0.0);  // with a rate: when each is due
  if (args.rate > 0.0) {
    std::mt19937_64 random(args.seed);
    std::exponential_distribution<double> gap(args.rate);
    double at = 0.0;
    for (double& due : send_at) due = at += gap(random);
  }
  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // of done, progress, stdout and broken
  std::int64_t done = 0;
  std::exception_ptr broken;  // why stdout takes no more
  Progress progress("requests");
  const Clock::time_point start = Clock::now();
  const auto wait_until = [&](Clock::time_point due) {
    for (auto now = Clock::now(); now < due && !interrupt_flag()->load(); now = Clock::now())
      std::this_thread::sleep_for(std::min<Clock::duration>(due - now, std::chrono::milliseconds(100)));
  };
  const auto take_next = [&] { return interrupt_flag()->load() ? all.size() : next++; };
  const auto work = [&] {
    for (std::size_t i = take_next(); i < all.size(); i = take_next()) {
      const std::string body = make_body(args, model, vocabulary, static_cast<std::int64_t>(i));
      const auto due = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(send_at[i]));
      if (args.rate > 0.0) wait_until(start + due);
      if (interrupt_flag()->load()) return;
      all[i] = run_one(client, body);
      const std::lock_guard lock(mutex);
      progress.update(++done, args.requests);
      if (!args.json || broken) continue;
      try {
        write_json({{"request", i},
                    {"ok", all[i].ok},
                    {"problem", all[i].problem},
                    {"completion_tokens", all[i].tokens},
                    {"ttft_ms", 1e3 * all[i].first_token},
                    {"e2e_ms", 1e3 * all[i].whole}});
      } catch (const Error&) {
        broken = std::current_exception();
        next = all.size();
      }
    }
  };
  // With a rate all may be on their way at once, so that the time of none depends on the others' end: of as many as a machine has
  // threads for.
  const std::int64_t clients = std::min(args.rate > 0.0 ? kMostClients : args.concurrency, args.requests);
  {
    std::vector<std::jthread> threads;
    for (std::int64_t i = 0; i < clients; ++i) threads.emplace_back(work);
  }
  const double wall = seconds_between(start, Clock::now());
  throw_if_interrupted();
  if (broken) std::rethrow_exception(broken);

  std::vector<double> first_token, per_token, gaps, whole;
  std::int64_t tokens = 0, failed = 0;
  for (const Seen& seen : all) {
    if (!seen.ok) {
      if (failed++ == 0) print_note("first failure: " + one_line(seen.problem));
      continue;
    }
    tokens += seen.tokens;
    first_token.push_back(seen.first_token);
    whole.push_back(seen.whole);
    if (seen.tokens > 1)
      per_token.push_back((seen.whole - seen.first_token) / static_cast<double>(seen.tokens - 1));
    gaps.insert(gaps.end(), seen.gaps.begin(), seen.gaps.end());
  }
  ordered_json summary = {{"requests", args.requests},
                          {"failed", failed},
                          {"seconds", wall},
                          {"output_tokens", tokens},
                          {"output_tokens_per_second", static_cast<double>(tokens) / wall},
                          {"requests_per_second", static_cast<double>(args.requests - failed) / wall},
                          {"ttft_ms", quantiles(first_token)},
                          {"tpot_ms", quantiles(per_token)},
                          {"itl_ms", quantiles(gaps)},
                          {"e2e_ms", quantiles(whole)}};
  if (args.json) {
    write_json(summary);
  } else {
    std::string text = fmt::format(
        "{} requests, {} failed, {:.1f} s: {:.1f} output tokens/s, {:.2f} requests/s\n", args.requests,
        failed, wall, static_cast<double>(tokens) / wall, static_cast<double>(args.requests - failed) / wall);
    text += fmt::format("{:28} {:>10} {:>10} {:>10}\n", "milliseconds", "p50", "p90", "p99");
    const std::pair<const char*, const char*> rows[] = {{"time to first token", "ttft_ms"},
                                                        {"time per token after it", "tpot_ms"},
                                                        {"between events", "itl_ms"},
                                                        {"whole request", "e2e_ms"}};
    for (const auto& [label, key] : rows) {
      const auto value = [&, &name = key](const char* quantile) {
        const ordered_json& number = summary[name][quantile];
        return number.is_null() ? std::string("-") : fmt::format("{:.1f}", number.get<double>());
      };
      text += fmt::format("{:28} {:>10} {:>10} {:>10}\n", label, value("p50"), value("p90"), value("p99"));
    }
    write_stdout(text);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace basin::cli
