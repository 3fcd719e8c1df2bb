// basin serve: load a model, listen, answer until a signal comes.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "models/cache.h"
#include "server/http.h"
#include "server/service.h"
#include "text/chat.h"

namespace basin::cli {
namespace {

std::string api_key(const ServeArgs& args) {
  if (args.api_key) return *args.api_key;
  const char* set = args.no_auth ? nullptr : std::getenv("BASIN_API_KEY");
  const std::string key = set == nullptr ? "" : set;
  if (!std::ranges::all_of(key, [](char c) { return c > ' ' && c < '\x7f'; })) {
    throw Error(ErrorCode::invalid_argument,
                "BASIN_API_KEY has spaces, or characters that are not ASCII; no header can carry it");
  }
  return key;
}

std::string model_name(const ServeArgs& args) {
  if (args.served_model_name) return *args.served_model_name;
  std::filesystem::path path = std::filesystem::path(args.model.model).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  if (path.filename() == "." || path.filename() == "..")
    path = std::filesystem::absolute(path).lexically_normal();
  const std::string extension = path.extension().string();
  return extension == ".gguf" || extension == ".safetensors" ? path.stem().string()
                                                             : path.filename().string();
}

// Every connection is a descriptor, and the usual limit of 1,024 is a soft one.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 16'384);
  setrlimit(RLIMIT_NOFILE, &limit);  // if not, connections wait in the system's queue
}

std::int64_t free_memory_bytes() {
  return static_cast<std::int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

// Pages for the keys and values of all answers at their longest, or as many as there is memory for.
std::int64_t page_count(const ServeArgs& args, const models::ModelConfig& config, const kv::Shape& shape) {
  const engine::StreamOptions& stream = args.model.stream;
  std::int64_t pages = 0;
  if (args.kv_memory_bytes) {
    pages = *args.kv_memory_bytes / shape.page_bytes();
    if (pages < 1) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--kv-memory {} is less than one page of {} tokens: {} bytes",
                              *args.kv_memory_bytes, shape.page_tokens, shape.page_bytes()));
    }
  } else {
    const std::int64_t tokens = std::min(args.max_model_len.value_or(config.context), config.context);
    const std::int64_t each = (tokens + shape.page_tokens - 1) / shape.page_tokens + 1;
    pages =
        std::clamp<std::int64_t>(free_memory_bytes() / 2 / shape.page_bytes(), 1, args.max_num_seqs * each);
  }
  if (stream.window) {
    const kv::Policy policy{stream.sink_tokens, *stream.window, true};
    const std::int64_t least = kv::page_bound(policy, shape.page_tokens, 1);
    if (pages < least) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{} sink tokens and a window of {} need {} pages, and there is memory for {}",
                              stream.sink_tokens, *stream.window, least, pages),
                  "give more with --kv-memory, or use a smaller --window");
    }
  }
  return std::min(pages, kv::PagePool::kUnlimited);
}

void describe(const ServeArgs& args, const server::ModelInfo& model, const models::Model& loaded,
              std::span<const kv::LayerKind> kinds) {
  const models::ModelConfig& config = *model.config;
  std::int64_t local = 0;
  for (const models::LayerAttention& layer : config.layers) local += layer.window > 0;
  print_note(fmt::format(
      "model    {}: {}, {:.1f} million parameters, {} layers, {} of them with a window of their own",
      model.name, config.architecture, static_cast<double>(loaded.parameters()) * 1e-6, config.layers.size(),
      local));
  print_note(fmt::format("context  {} tokens; requests that do not say see {}", config.context,
                         describe_visible(args.model.stream)));
  const auto most_bytes = [](const kv::LayerKind& kind) {
    return static_cast<double>(kind.pool->pages().limit() * kind.pool->shape().page_bytes());
  };
  print_note(fmt::format("memory   {} pages of {} tokens, {} each: {} of keys and values at most",
                         model.pages, model.page_tokens,
                         human_bytes(static_cast<double>(kinds.front().pool->shape().page_bytes())),
                         human_bytes(most_bytes(kinds.front()))));
  for (const kv::LayerKind& kind : kinds.subspan(1)) {
    print_note(fmt::format("         and of the {} layers with a window of {}: {} at most",
                           kind.pool->shape().layers, kind.window, human_bytes(most_bytes(kind))));
  }
  print_note(fmt::format("batch    {} sequences, {} tokens a pass, prefix cache {}", args.max_num_seqs,
                         args.max_num_batched_tokens.value_or(std::max<std::int64_t>(512, args.max_num_seqs)),
                         args.prefix_cache ? "on" : "off"));
}

}  // namespace

int run(const ServeArgs& args) {
  const auto start = std::chrono::steady_clock::now();
  const std::string key = api_key(args);
  raise_descriptor_limit();

  // The port first: that it is taken must not be found out after a minute of loading.
  server::Service* service = nullptr;
  server::HttpOptions http_options;
  http_options.host = args.host;
  http_options.port = static_cast<std::uint16_t>(args.port);
  server::HttpServer http(
      http_options,
      [&service](server::HttpRequest request, const std::shared_ptr<server::Exchange>& exchange) {
        service->handle(std::move(request), exchange);
      },
      [&service](const server::HttpRequest& request) { return service->refusal(request); },
      server::Service::error_body);
  if (!http.loopback() && key.empty() && !args.no_auth) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--host {} lets other machines in, and there is no key", args.host),
                "set BASIN_API_KEY, or say --no-auth");
  }

  Session session(args.model);
  const std::int64_t batch_tokens =
      args.max_num_batched_tokens.value_or(std::max<std::int64_t>(512, args.max_num_seqs));
  const kv::Shape shape =
      models::cache_shape(session.config(), args.model.stream.compute, args.model.stream.page_tokens);

  server::ModelInfo model;
  model.name = model_name(args);
  model.path = args.model.model;
  model.created = std::time(nullptr);
  model.config = &session.config();
  model.tokenizer = &session.tokenizer(false);
  std::unique_ptr<text::ChatFormat> chat;
  try {
    chat = text::find_chat_format(session.tokenizer(false), session.loaded.chat_template,
                                  session.config().architecture);
  } catch (const Error& error) {  // completions are served all the same
    model.chat_problem = error.what();
    print_note(fmt::format("note: no chat: {}", error.what()));
  }
  model.chat = chat.get();
  model.chat_template = session.loaded.chat_template;
  model.defaults = args.model.stream;
  model.max_model_len = args.max_model_len.value_or(0);
  model.page_tokens = shape.page_tokens;
  model.pages = page_count(args, session.config(), shape);
  model.max_sequences = args.max_num_seqs;

  engine::ModelRunner runner(*session.loaded.model, session.pool, engine::pass_options(args.model.stream),
                             {shape.page_tokens, model.pages, args.max_num_seqs, batch_tokens});
  describe(args, model, *session.loaded.model, runner.kinds());
  engine::EngineOptions engine_options;
  engine_options.batch.max_sequences = args.max_num_seqs;
  engine_options.batch.max_batch_tokens = batch_tokens;
  engine_options.batch.prefix_cache = args.prefix_cache;
  engine_options.max_waiting = args.max_queued;
  engine::Engine engine(runner, session.pool, session.loaded.tokenizer.get(), engine_options);
  server::ServiceOptions service_options;
  service_options.api_key = key;
  service_options.check_host = http.loopback();
  service_options.quiet = args.quiet;
  service_options.version = BASIN_VERSION;
  server::Service the_service(engine, std::move(model), service_options);
  service = &the_service;
  // Answers refer to the service: the engine ends before it, and nothing reaches the engine after its end.
  const struct EndOfEngine {
    server::Service& service;
    engine::Engine& engine;
    ~EndOfEngine() {
      service.stop();
      engine.stop();
    }
  } end_of_engine{the_service, engine};

  const std::string host =
      args.host.find(':') == std::string::npos ? args.host : fmt::format("[{}]", args.host);
  print_note(fmt::format("ready    in {:.2f} s",
                         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()));
  // Whoever reads the line may send a signal at once.
  http.hold_signals();
  throw_if_interrupted();
  write_stdout(fmt::format("listening on http://{}:{}\n", host, http.port()));
  int first_signal = 0;
  http.run([&](int number) {
    if (first_signal == 0) {
      first_signal = number;
      print_note("ending: no new requests; a second signal ends those that run");
      the_service.drain();
      http.drain();
    } else {
      engine.cancel_all();
      http.stop();
    }
  });
  return first_signal == SIGINT ? 130 : 0;
}

}  // namespace basin::cli
