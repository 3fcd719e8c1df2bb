#include "cli/args.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <string_view>
#include <vector>

#include "basin/base/error.h"
#include "cli/usage_error.h"
#include "server/http_client.h"
#include "text/tokenizer.h"

namespace basin::cli {
namespace {

constexpr std::int64_t kMany = std::int64_t{1} << 40;  // beyond any sensible count, far from overflow
constexpr std::int64_t kMostPageTokens = std::int64_t{1} << 20;
constexpr std::int64_t kMostThreads = 1024;
constexpr std::int64_t kMostMapBins = 1024;

// A whole number in [low, high]; a suffix k means 1000, K means 1024.
std::int64_t parse_integer(const std::string& flag, const std::string& text, std::int64_t low,
                           std::int64_t high) {
  std::string_view digits = text;
  std::int64_t unit = 1;
  if (digits.size() > 1 && (digits.back() == 'k' || digits.back() == 'K')) {
    unit = digits.back() == 'k' ? 1000 : 1024;
    digits.remove_suffix(1);
  }
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  if (!whole || value > high / unit || value * unit < low) {
    const std::string range =
        high >= kMany ? fmt::format("{} or more", low) : fmt::format("{} to {}", low, high);
    throw UsageError(fmt::format("{} is '{}'; it must be a whole number, {}", flag, text, range));
  }
  return value * unit;
}

// Bytes: a whole number, in units of kB, MB, GB (1000) or KiB, MiB, GiB (1024) if it names one.
std::int64_t parse_bytes(const std::string& flag, const std::string& text) {
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {{"kB", 1000},         {"MB", 1000'000},
                                                                  {"GB", 1000'000'000}, {"KiB", 1 << 10},
                                                                  {"MiB", 1 << 20},     {"GiB", 1 << 30}};
  for (const auto& [name, unit] : kUnits) {
    if (!std::string_view(text).ends_with(name)) continue;
    const std::string number = text.substr(0, text.size() - name.size());
    return parse_integer(flag, number, 1, (std::int64_t{1} << 60) / unit) * unit;
  }
  return parse_integer(flag, text, 1, std::int64_t{1} << 60);
}

double parse_real(const std::string& flag, const std::string& text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    throw UsageError(fmt::format("{} is '{}'; it must be a number", flag, text));
  }
  return value;
}

void require_utf8(const std::string& flag, const std::string& text) {
  if (const auto offset = text::first_invalid_utf8(text)) {
    throw UsageError(fmt::format("{} is not UTF-8: invalid byte at offset {}", flag, *offset));
  }
}

// Shorthands for options whose text is parsed by us, so that every refusal has one shape.
class Options {
 public:
  explicit Options(CLI::App& app) : app_(app) {}

  void integer(const std::string& flag, std::int64_t low, std::int64_t high,
               const std::function<void(std::int64_t)>& set, const std::string& help) {
    text(
        flag, [=](const std::string& value) { set(parse_integer(flag, value, low, high)); }, "N", help);
  }
  void real(const std::string& flag, double& target, const std::string& help) {
    text(
        flag, [flag, &target](const std::string& value) { target = parse_real(flag, value); }, "X", help);
  }
  void bytes(const std::string& flag, const std::function<void(std::int64_t)>& set, const std::string& help) {
    text(
        flag, [=](const std::string& value) { set(parse_bytes(flag, value)); }, "BYTES", help);
  }
  void string(const std::string& flag, std::optional<std::string>& target, const std::string& kind,
              const std::string& help) {
    text(
        flag, [&target](const std::string& value) { target = value; }, kind, help);
  }
  void word(const std::string& flag, const std::function<void(const std::string&)>& set,
            const std::string& kind, const std::string& help) {
    text(flag, set, kind, help);
  }
  template <typename String>  // std::string or std::optional of it
  CLI::Option* path(const std::string& flag, String& target, const std::string& help) {
    const auto set = [flag, &target](const std::string& value) {
      if (value.empty()) throw UsageError(flag + " is empty; it must name a file");
      target = value;
    };
    return text(flag, set, "FILE", help);
  }
  // `set` gets the index of the word given.
  CLI::Option* choice(const std::string& flag, const std::vector<std::string>& words,
                      const std::function<void(std::size_t)>& set, const std::string& help) {
    const auto parse = [=](const std::string& value) {
      const auto found = std::find(words.begin(), words.end(), value);
      if (found == words.end()) {
        throw UsageError(fmt::format("{} is '{}'; it must be {}", flag, value, fmt::join(words, " or ")));
      }
      set(static_cast<std::size_t>(found - words.begin()));
    };
    return text(flag, parse, fmt::format("{}", fmt::join(words, "|")), help);
  }

 private:
  CLI::Option* text(const std::string& flag, const std::function<void(const std::string&)>& set,
                    const std::string& kind, const std::string& help) {
    // Given twice is an error: the reader of a script would have to know which one wins.
    const auto once = [flag, set](const std::vector<std::string>& values) {
      if (values.size() != 1) throw UsageError(flag + " is given more than once");
      set(values[0]);
      return true;
    };
    return app_.add_option(flag, CLI::callback_t(once), help)
        ->type_name(kind)
        ->type_size(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }

  CLI::App& app_;
};

const char* const kModelHelp =
    "a directory in the Hugging Face layout, a .gguf file, or a .safetensors file beside its config.json";

template <typename String>  // std::string or std::optional of it
CLI::Option* add_model(CLI::App& app, String& model) {
  const auto set = [&model](const std::string& value) {
    if (value.empty()) throw UsageError("MODEL is empty; it must name a file or a directory");
    model = value;
  };
  return app.add_option_function<std::string>("MODEL", set, kModelHelp)->type_name("");
}

// With `chunks`, --chunk-tokens is among them.
void add_common(CLI::App& app, ModelArgs& args, bool chunks = true, bool model_required = true) {
  add_model(app, args.model)->required(model_required);
  engine::StreamOptions& stream = args.stream;
  Options options(app);
  options.integer(
      "--sink-tokens", 0, kMany, [&](std::int64_t n) { stream.sink_tokens = n; },
      "first tokens that stay visible; needs --window (default 0)");
  options.integer(
      "--window", 1, kMany, [&](std::int64_t n) { stream.window = n; },
      "recent tokens that are visible, the current one included (default: all)");
  options.choice(
      "--positions", {"in-cache", "absolute"},
      [&](std::size_t i) {
        stream.positions = i == 0 ? engine::PositionMode::in_cache : engine::PositionMode::absolute;
      },
      "how far away the sink tokens look: by kept tokens, or by where they stood (default in-cache)");
  if (chunks) {
    options.integer(
        "--chunk-tokens", 1, kMany, [&](std::int64_t n) { stream.chunk_tokens = n; },
        "most tokens of one pass; never changes a result (default 512)");
  }
  options.integer(
      "--page-tokens", 1, kMostPageTokens, [&](std::int64_t n) { stream.page_tokens = n; },
      "tokens of one page of keys and values; never changes a result (default 16)");
  options.integer(
      "--threads", 1, kMostThreads, [&](std::int64_t n) { args.threads = static_cast<int>(n); },
      "threads; never changes a result (default: one per core)");
  options.choice(
      "--device", {"cpu", "cuda"},
      [](std::size_t i) {
        if (i == 1)
          throw UsageError("--device cuda: this build has the CPU backend only", "use --device cpu");
      },
      "where to compute (default cpu)");
  options.choice(
      "--compute", {"fp32", "fast"},
      [&](std::size_t i) { stream.compute = i == 0 ? ops::Compute::fp32 : ops::Compute::fast; },
      stream.compute == ops::Compute::fp32 ? "arithmetic of the activations (default fp32)"
                                           : "arithmetic of the activations (default fast)");
  app.add_flag("--index-fp8", stream.index.fp8,
               "a sparse model's indexers score in fp8 after a Hadamard transform, as DeepSeek's servers do");
  options.integer(
      "--index-sink-tokens", 0, kMany, [&](std::int64_t n) { stream.index.sink_tokens = n; },
      "a sparse model's indexers select the first N keys whatever their scores (default 0)");
  options.integer(
      "--index-window", 0, kMany, [&](std::int64_t n) { stream.index.window = n; },
      "and the last N, the current one included (default 0)");
}

void check(const ModelArgs& args) {
  if (args.stream.sink_tokens > 0 && !args.stream.window) {
    throw UsageError(
        fmt::format("--sink-tokens {} without --window: with unlimited attention they mean nothing",
                    args.stream.sink_tokens),
        "add --window M, the number of recent tokens that stay visible");
  }
}

void require_one(const std::vector<std::pair<const char*, bool>>& given) {
  std::vector<std::string> names, used;
  for (const auto& [flag, is_given] : given) {
    names.emplace_back(flag);
    if (is_given) used.emplace_back(flag);
  }
  if (used.empty()) throw UsageError(fmt::format("one of {} is needed", fmt::join(names, ", ")));
  if (used.size() > 1) throw UsageError(fmt::format("{} exclude each other", fmt::join(used, " and ")));
}

void check_text(const std::string& flag, const std::optional<std::string>& text) {
  if (!text) return;
  if (text->empty()) throw UsageError(flag + " is empty");
  require_utf8(flag, *text);
}

void add_json(CLI::App& app, bool& json) {
  app.add_flag("--json", json, "one JSON object on stdout");
}

void add_generate(CLI::App& app, GenerateArgs& args) {
  add_common(app, args.model);
  Options options(app);
  options.string("--prompt", args.prompt, "TEXT", "text to continue; special tokens in it are recognised");
  options.path("--prompt-file", args.prompt_file, "the same, from a file");
  options.path("--tokens", args.tokens_file, "safetensors file with input_ids [T], read as they are");
  app.add_flag("--chat", args.chat, "the prompt is a user's message in the model's chat format");
  options.string("--system", args.system, "TEXT",
                 "system message of --chat; empty = none (default: the model's own)");
  app.add_flag("!--no-thinking", args.thinking,
               "with --chat, a model that can do without thinking answers at once");
  options.integer(
      "--max-tokens", 1, kMany, [&](std::int64_t n) { args.max_tokens = n; },
      "most tokens to generate (default 128)");
  options.real("--temperature", args.sampling.temperature, "0 = always the most likely token (default 0)");
  options.integer(
      "--top-k", 0, kMany, [&](std::int64_t n) { args.sampling.top_k = n; },
      "sample from the K most likely tokens; 0 = off (default 0)");
  options.real("--top-p", args.sampling.top_p,
               "sample from the most likely tokens that hold this mass (default 1)");
  options.real("--min-p", args.sampling.min_p,
               "drop tokens below this share of the most likely one (default 0)");
  options.real("--repetition-penalty", args.sampling.repetition_penalty,
               "above 1, seen tokens get rarer (default 1)");
  options.integer(
      "--seed", 0, std::numeric_limits<std::int64_t>::max(),
      [&](std::int64_t n) { args.sampling.seed = static_cast<std::uint64_t>(n); },
      "seed of the sampling (default 0)");
  app.add_flag("--ignore-eos", args.ignore_eos, "go on after the tokens that end a text, up to --max-tokens");
  add_json(app, args.json);
}

void check(const GenerateArgs& args) {
  require_one({{"--prompt", args.prompt.has_value()},
               {"--prompt-file", args.prompt_file.has_value()},
               {"--tokens", args.tokens_file.has_value()}});
  check_text("--prompt", args.prompt);
  if (args.system) require_utf8("--system", *args.system);
  if (args.chat && args.tokens_file) {
    throw UsageError("--chat and --tokens exclude each other", "give the message with --prompt");
  }
  if (args.system && !args.chat) throw UsageError("--system without --chat", "add --chat");
  if (!args.thinking && !args.chat) throw UsageError("--no-thinking without --chat", "add --chat");
  check(args.model);
  try {
    ops::check(args.sampling);
  } catch (const Error& error) {
    throw UsageError(error.what(), error.hint());
  }
}

void add_perplexity(CLI::App& app, PerplexityArgs& args) {
  add_common(app, args.model);
  Options options(app);
  options.path("--text-file", args.text_file, "UTF-8 text to score");
  options.path("--tokens", args.tokens_file, "safetensors file with input_ids [T], read as they are");
  options.integer(
      "--max-tokens", 1, kMany, [&](std::int64_t n) { args.max_tokens = n; },
      "score the first N tokens only (default: all)");
  add_json(app, args.json);
}

void add_logits(CLI::App& app, LogitsArgs& args) {
  args.model.stream.compute = ops::Compute::fp32;
  add_common(app, args.model);
  Options options(app);
  options.path("--tokens", args.tokens_file, "safetensors file with input_ids [T], read as they are")
      ->required();
  options.path("--out", args.out, "safetensors file to write: logits float32 [T, vocabulary]")->required();
  add_json(app, args.json);
}

void add_tokenize(CLI::App& app, TokenizeArgs& args) {
  add_model(app, args.model)->required();
  Options options(app);
  options.string("--text", args.text, "TEXT", "text to tokenize");
  options.path("--text-file", args.text_file, "the same, from a file");
  app.add_flag_callback(
      "--no-special", [&args] { args.special = false; },
      "read special tokens in the text as plain text, and add no BOS");
  add_json(app, args.json);
}

void add_key(CLI::App& app, std::optional<std::string>& key, const char* help) {
  const auto checked = [&key](const std::string& value) {
    if (value.empty()) throw UsageError("--api-key is empty");
    if (!std::all_of(value.begin(), value.end(), [](char c) { return c > ' ' && c < '\x7f'; }))
      throw UsageError("--api-key has spaces, or characters that are not ASCII; no header can carry it");
    key = value;
  };
  Options(app).word("--api-key", checked, "KEY", help);
}

void add_serve(CLI::App& app, ServeArgs& args) {
  add_common(app, args.model, false);
  Options options(app);
  const auto not_empty = [](const std::string& flag, std::optional<std::string>& target) {
    return [flag, &target](const std::string& value) {
      if (value.empty()) throw UsageError(flag + " is empty");
      target = value;
    };
  };
  options.word(
      "--host",
      [&](const std::string& value) {
        if (value.empty()) throw UsageError("--host is empty");
        args.host = value;
      },
      "ADDRESS", "address to listen on (default 127.0.0.1)");
  options.integer(
      "--port", 0, 65535, [&](std::int64_t n) { args.port = n; }, "port; 0 = any free one (default 8000)");
  add_key(app, args.api_key,
          "clients must send it; others see it in the list of processes, so better set BASIN_API_KEY");
  app.add_flag("--no-auth", args.no_auth, "listen on other addresses than this machine's own without a key");
  options.word("--served-model-name", not_empty("--served-model-name", args.served_model_name), "NAME",
               "what clients call the model (default: the name of its file or folder)");
  options.integer(
      "--max-model-len", 1, kMany, [&](std::int64_t n) { args.max_model_len = n; },
      "most tokens of a prompt and its answer (default: the context; with a window no limit)");
  options.integer(
      "--max-num-seqs", 1, 4096, [&](std::int64_t n) { args.max_num_seqs = n; },
      "most answers written at once (default 32)");
  options.integer(
      "--max-num-batched-tokens", 1, kMostPageTokens,
      [&](std::int64_t n) { args.max_num_batched_tokens = n; },
      "most tokens of one pass; never changes a result (default 512)");
  options.bytes(
      "--kv-memory", [&](std::int64_t n) { args.kv_memory_bytes = n; },
      "most memory for keys and values, such as 2GiB (default: what all answers need, half of the free "
      "memory at most)");
  options.integer(
      "--max-queued", 1, kMostPageTokens, [&](std::int64_t n) { args.max_queued = n; },
      "most answers that wait; the next gets status 429 (default 1024)");
  app.add_flag_callback(
      "--no-prefix-cache", [&args] { args.prefix_cache = false; },
      "compute the beginning of every prompt anew");
  app.add_flag("--quiet", args.quiet, "no line on stderr for each request");
}

void check(const ServeArgs& args) {
  check(args.model);
  if (args.max_num_batched_tokens && *args.max_num_batched_tokens < args.max_num_seqs) {
    throw UsageError(fmt::format(
        "--max-num-batched-tokens {} is less than --max-num-seqs {}: each answer needs a token of "
        "every pass",
        *args.max_num_batched_tokens, args.max_num_seqs));
  }
  if (args.served_model_name) require_utf8("--served-model-name", *args.served_model_name);
  if (args.api_key && args.no_auth) throw UsageError("--api-key and --no-auth exclude each other");
}

void add_url(CLI::App& app, const std::function<void(const std::string&)>& set) {
  const auto checked = [set](const std::string& value) {
    if (value.rfind("http://", 0) != 0)
      throw UsageError(fmt::format("--url is '{}'; it must begin with http://", value));
    try {
      [[maybe_unused]] const server::HttpClient tried(value, "");
    } catch (const Error& error) {
      throw UsageError(fmt::format("--url {}", error.what()), error.hint());
    }
    set(value);
  };
  Options(app).word("--url", checked, "URL",
                    "a server that speaks OpenAI's API, such as http://127.0.0.1:8000");
}

void add_chat(CLI::App& app, ChatArgs& args) {
  add_common(app, args.model, true, false);
  add_url(app, [&args](const std::string& url) { args.url = url; });
  add_key(app, args.api_key, "key of the server (default: BASIN_API_KEY)");
  Options options(app);
  options.string("--system", args.system, "TEXT", "system message; empty = none (default: the model's own)");
  options.integer(
      "--max-tokens", 1, kMany, [&](std::int64_t n) { args.max_tokens = n; },
      "most tokens of an answer (default: what fits)");
  args.sampling.temperature = 0.8;
  options.real("--temperature", args.sampling.temperature, "0 = always the most likely token (default 0.8)");
  options.real("--top-p", args.sampling.top_p,
               "sample from the most likely tokens that hold this mass (default 1)");
}

void check(const ChatArgs& args, const CLI::App& app) {
  require_one({{"MODEL", !args.model.model.empty()}, {"--url", args.url.has_value()}});
  for (const char* flag : {"--threads", "--chunk-tokens", "--page-tokens", "--device", "--compute",
                           "--index-fp8", "--index-sink-tokens", "--index-window"}) {
    if (args.url && app.count(flag) > 0)
      throw UsageError(fmt::format("{} has no meaning with --url: the server has its own", flag),
                       fmt::format("leave {} out", flag));
  }
  if (args.url && app.count("--positions") > 0 && !args.model.stream.window)
    throw UsageError("--positions without --window", "the server's own window has its own positions");
  if (args.system) require_utf8("--system", *args.system);
  if (args.api_key && !args.url) throw UsageError("--api-key without --url");
  check(args.model);
  try {
    ops::check(args.sampling);
  } catch (const Error& error) {
    throw UsageError(error.what(), error.hint());
  }
}

void add_bench(CLI::App& app, BenchArgs& args) {
  add_common(app, args.model);
  Options options(app);
  options.integer(
      "--depth", 1, kMany, [&](std::int64_t n) { args.depth_tokens = n; },
      "tokens before those whose decoding is measured (default 32: a short context)");
  add_json(app, args.json);
}

void add_bench_serve(CLI::App& app, BenchServeArgs& args) {
  add_url(app, [&args](const std::string& url) { args.url = url; });
  add_key(app, args.api_key, "key of the server (default: BASIN_API_KEY)");
  Options options(app);
  options.integer(
      "--requests", 1, 1'000'000, [&](std::int64_t n) { args.requests = n; }, "how many in all (default 32)");
  options.integer(
      "--concurrency", 1, kMostClients, [&](std::int64_t n) { args.concurrency = n; },
      "how many at once, each followed by the next (default 8)");
  options.real("--rate", args.rate, "instead: so many a second, at random times, whatever has ended");
  options.integer(
      "--input-tokens", 1, kMostPageTokens, [&](std::int64_t n) { args.input_tokens = n; },
      "tokens of a prompt that no other has (default 256)");
  options.integer(
      "--shared-tokens", 0, kMostPageTokens, [&](std::int64_t n) { args.shared_tokens = n; },
      "tokens before them that all prompts have (default 0)");
  options.integer(
      "--vocabulary", 2, kMany, [&](std::int64_t n) { args.vocabulary = n; },
      "ids of prompts are below it, and in its last 90 % (default: what the server says, else 20000)");
  options.integer(
      "--output-tokens", 1, kMany, [&](std::int64_t n) { args.output_tokens = n; },
      "tokens of an answer (default 256)");
  options.integer(
      "--window", 1, kMany, [&](std::int64_t n) { args.window = n; },
      "window of every request (default: the server's)");
  options.integer(
      "--sink-tokens", 0, kMany, [&](std::int64_t n) { args.sink_tokens = n; },
      "sink tokens beside it (default 0)");
  options.integer(
      "--seed", 0, std::numeric_limits<std::int64_t>::max(),
      [&](std::int64_t n) { args.seed = static_cast<std::uint64_t>(n); },
      "seed of prompts and times (default 0)");
  app.add_flag("--json", args.json, "one JSON object a request and one at the end, each on a line");
}

void check(const BenchServeArgs& args, const CLI::App& app) {
  if (args.url.empty()) throw UsageError("--url is missing");
  if (app.count("--rate") > 0) {
    if (!(args.rate >= 0.001 && args.rate <= 1e6))
      throw UsageError(fmt::format("--rate is {}; it must be 0.001 to 1000000", args.rate));
    if (app.count("--concurrency") > 0) throw UsageError("--rate and --concurrency exclude each other");
  }
  if (args.sink_tokens > 0 && !args.window) throw UsageError("--sink-tokens without --window");
}

void add_probe(CLI::App& app, ProbeArgs& args) {
  add_common(app, args.model, false, false);
  Options options(app);
  options.path("--text-file", args.text_file, "UTF-8 text to read");
  options.path("--tokens", args.tokens_file, "safetensors file with input_ids [T], read as they are");
  options.path("--trace", args.trace_file,
               "recorded selections to study instead of a model: .npz, .safetensors, or a server's answer");
  options.path("--out", args.out, "folder for report.html, summary.txt, summary.json, data.npz and figures/")
      ->required();
  options.integer(
      "--max-tokens", 1, kMany, [&](std::int64_t n) { args.max_tokens = n; },
      "read the first N tokens only (default: all)");
  app.add_flag("--allow-beyond-context", args.allow_beyond_context,
               "read a text beyond the trained context without a window, too");
  options.integer(
      "--map-bins", 16, kMostMapBins, [&](std::int64_t n) { args.map_bins = n; },
      "most rows and columns of a map (default 512)");
  options.integer(
      "--topk", 1, kMany, [&](std::int64_t n) { args.topk = n; },
      "with a model: record the K keys of largest mean weight of every query, as trace.npz; with a raw "
      "trace: its width");
  options.integer(
      "--layers", 1, kMany, [&](std::int64_t n) { args.layers = n; }, "layers of a raw trace");
  options.integer(
      "--from-query", 1, kMany, [&](std::int64_t n) { args.from_query = n; },
      "first query of the study of a trace (default: the width of its sets)");
  options.integer(
      "--to-query", 1, kMany, [&](std::int64_t n) { args.to_query = n; },
      "last query of the study of a trace (default: its last)");
  options.real("--target", args.target, "share of the mass that the advised window keeps (default 0.95)");
  app.add_flag_callback(
      "--no-advice", [&args] { args.advise = false; }, "do not measure perplexity at the advised window");
  add_json(app, args.json);
}

void check(const ProbeArgs& args, const CLI::App& app) {
  if (!args.trace_file && args.model.model.empty()) {
    throw UsageError("MODEL or --trace is needed", "see basin probe --help");
  }
  const std::vector<std::string_view> of_both = {"--out", "--json", "--topk"};
  const std::vector<std::string_view> of_trace = {"--trace", "--layers", "--from-query", "--to-query"};
  const auto listed = [](const std::vector<std::string_view>& flags, const std::string& flag) {
    return std::find(flags.begin(), flags.end(), flag) != flags.end();
  };
  for (const CLI::Option* option : app.get_options()) {
    const std::string flag = option->get_name();
    if (option->count() == 0 || listed(of_both, flag)) continue;
    if (args.trace_file && !listed(of_trace, flag)) {
      throw UsageError(fmt::format("{} has no meaning with --trace, which runs no model", flag),
                       fmt::format("leave {} out", flag));
    }
    if (!args.trace_file && listed(of_trace, flag)) {
      throw UsageError(fmt::format("{} belongs to --trace", flag), fmt::format("leave {} out", flag));
    }
  }
  if (args.trace_file) return;
  require_one({{"--text-file", args.text_file.has_value()}, {"--tokens", args.tokens_file.has_value()}});
  if (args.target <= 0.0 || args.target >= 1.0) {
    throw UsageError(fmt::format("--target is {}; it must lie between 0 and 1", args.target));
  }
  if (args.topk > 0 && args.model.stream.window) {
    throw UsageError("--topk and --window exclude each other: sets are recorded of queries that see all keys",
                     "leave one of them out");
  }
  if (args.allow_beyond_context && args.model.stream.window) {
    throw UsageError("--allow-beyond-context and --window exclude each other",
                     "a window reads any length already");
  }
  check(args.model);
}

void add_convert(CLI::App& app, ConvertArgs& args) {
  const auto name_of = [](const char* word, std::string& target) {
    return [word, &target](const std::string& value) {
      if (value.empty())
        throw UsageError(fmt::format("{} is empty; it must name a file or a directory", word));
      target = value;
    };
  };
  app.add_option_function<std::string>("IN", name_of("IN", args.in), kModelHelp)->type_name("")->required();
  app.add_option_function<std::string>("OUT", name_of("OUT", args.out),
                                       "a .gguf file, a .safetensors file, or a directory to make")
      ->type_name("")
      ->required();
  static const std::vector<DType> kTypes = {DType::f32,  DType::f16,  DType::bf16, DType::q8_0,
                                            DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1,
                                            DType::q4_k, DType::q5_k, DType::q6_k, DType::mxfp4};
  std::vector<std::string> words;
  for (const DType type : kTypes) words.emplace_back(name(type));
  words.emplace_back("same");
  Options options(app);
  options
      .choice(
          "--type", words,
          [&](std::size_t i) {
            if (i < kTypes.size()) args.type = kTypes[i];
          },
          "what matrices become, or the same that they are; vectors become f32, and what has its type "
          "already is copied bit for "
          "bit")
      ->required();
  options.integer(
      "--threads", 1, kMostThreads, [&](std::int64_t n) { args.threads = static_cast<int>(n); },
      "threads; never changes a result (default: one per core)");
  add_json(app, args.json);
}

// Flags may be spelled with `_` for `-`. Values are left alone.
std::vector<std::string> normalise(int argc, const char* const* argv, const CLI::App& app) {
  std::vector<std::string> words;
  const CLI::App* command = &app;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (command == &app) {
      const std::vector<const CLI::App*> named =
          app.get_subcommands([&](const CLI::App* candidate) { return candidate->get_name() == word; });
      if (!named.empty()) command = named.front();
    } else if (word == "--") {
      for (; i < argc; ++i) words.emplace_back(argv[i]);
      break;
    } else if (word.rfind("--", 0) == 0) {
      const std::size_t name_end = std::min(word.find('='), word.size());
      std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(name_end), '_', '-');
      const CLI::Option* option = command->get_option_no_throw(word.substr(0, name_end));
      if (option != nullptr && option->get_expected_min() == 0) {
        if (name_end < word.size())
          throw UsageError(word.substr(0, name_end) + " takes no value", "leave the = out");
      } else if (option != nullptr) {
        if (name_end < word.size()) {  // `--flag=` has a value too, an empty one
          words.push_back(word.substr(0, name_end));
          word.erase(0, name_end + 1);
        } else if (i + 1 < argc) {
          words.push_back(word);
          word = argv[++i];
        }
      }
    }
    words.push_back(word);
  }
  return words;
}

}  // namespace

Command parse(int argc, const char* const* argv) {
  // `bench serve` is a command of its own; a model of that name is ./serve.
  std::vector<const char*> shifted(argv, argv + argc);
  if (argc > 2 && std::string_view(argv[1]) == "bench" && std::string_view(argv[2]) == "serve") {
    shifted.erase(shifted.begin() + 1);
    shifted[1] = "bench-serve";
    --argc;
    argv = shifted.data();
  }

  CLI::App app("Basin runs language models whose attention leans on sinks, at any length, in bounded memory.",
               "basin");
  app.set_version_flag("--version", std::string("basin ") + BASIN_VERSION);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Numbers take a suffix: 1k = 1000, 1K = 1024. Results go to stdout, everything else to stderr.\n"
      "Exit codes: 0 ok, 2 wrong command line, 1 any other error, 130 Ctrl-C.");

  GenerateArgs generate;
  PerplexityArgs perplexity;
  LogitsArgs logits;
  TokenizeArgs tokenize;
  ConvertArgs convert;
  InfoArgs info;
  BenchArgs bench;
  ProbeArgs probe;
  ServeArgs serve;
  ChatArgs chat;
  BenchServeArgs bench_serve;
  CLI::App* const generate_app = app.add_subcommand("generate", "Continue a prompt or answer a message");
  CLI::App* const perplexity_app = app.add_subcommand("perplexity", "Score a text, token by token");
  CLI::App* const logits_app = app.add_subcommand("logits", "Write the logits of every token");
  CLI::App* const tokenize_app = app.add_subcommand("tokenize", "Show the tokens of a text");
  CLI::App* const convert_app =
      app.add_subcommand("convert", "Write a model again with another type of weights");
  CLI::App* const info_app = app.add_subcommand("info", "Describe this build and machine, or a model");
  CLI::App* const bench_app = app.add_subcommand("bench", "Measure speed against this machine's ceilings");
  CLI::App* const serve_app = app.add_subcommand("serve", "Answer over HTTP, as OpenAI's servers do");
  add_serve(*serve_app, serve);
  CLI::App* const chat_app = app.add_subcommand("chat", "Talk to a model, or to a server");
  add_chat(*chat_app, chat);
  CLI::App* const bench_serve_app = app.add_subcommand(
      "bench-serve", "Also 'bench serve': put load on a server, and see what its clients see");
  add_bench_serve(*bench_serve_app, bench_serve);
  add_generate(*generate_app, generate);
  add_perplexity(*perplexity_app, perplexity);
  add_logits(*logits_app, logits);
  add_tokenize(*tokenize_app, tokenize);
  add_convert(*convert_app, convert);
  add_model(*info_app, info.model);
  add_json(*info_app, info.json);
  add_bench(*bench_app, bench);
  CLI::App* const probe_app =
      app.add_subcommand("probe", "See where attention goes, and what window a model needs");
  add_probe(*probe_app, probe);

  std::string help_of = "basin";
  if (argc > 1 && argv[1][0] != '-') {
    const std::string word = argv[1];
    const auto commands = app.get_subcommands([&](CLI::App* command) { return command->get_name() == word; });
    if (commands.empty()) throw UsageError(fmt::format("'{}' is not a command", word), "see basin --help");
    help_of += " " + word;
  }
  try {
    std::vector<std::string> words = normalise(argc, argv, app);
    std::reverse(words.begin(), words.end());  // what CLI11 wants
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    return ShowText{app.help()};
  } catch (const CLI::CallForAllHelp&) {
    return ShowText{app.help("", CLI::AppFormatMode::All)};
  } catch (const CLI::CallForVersion& version) {
    return ShowText{std::string(version.what()) + "\n"};
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what(), fmt::format("see {} --help", help_of));
  }

  if (generate_app->parsed()) {
    check(generate);
    return generate;
  }
  if (perplexity_app->parsed()) {
    require_one({{"--text-file", perplexity.text_file.has_value()},
                 {"--tokens", perplexity.tokens_file.has_value()}});
    check(perplexity.model);
    return perplexity;
  }
  if (logits_app->parsed()) {
    check(logits.model);
    return logits;
  }
  if (tokenize_app->parsed()) {
    require_one({{"--text", tokenize.text.has_value()}, {"--text-file", tokenize.text_file.has_value()}});
    check_text("--text", tokenize.text);
    return tokenize;
  }
  if (convert_app->parsed()) return convert;
  if (info_app->parsed()) return info;
  if (probe_app->parsed()) {
    check(probe, *probe_app);
    return probe;
  }
  if (chat_app->parsed()) {
    check(chat, *chat_app);
    return chat;
  }
  if (bench_serve_app->parsed()) {
    check(bench_serve, *bench_serve_app);
    return bench_serve;
  }
  if (serve_app->parsed()) {
    check(serve);
    return serve;
  }
  check(bench.model);
  return bench;
}

}  // namespace basin::cli
