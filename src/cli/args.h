// argv, checked as far as argv alone allows, as plain structs: one per sub-command.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "engine/stream.h"
#include "ops/sampling.h"

namespace basin::cli {

/// What every sub-command that runs a model takes.
struct ModelArgs {
  std::string model;  // MODEL as given
  engine::StreamOptions stream;
  int threads = 0;  // 0 = one per core
};

struct GenerateArgs {
  ModelArgs model;
  std::optional<std::string> prompt, prompt_file, tokens_file;  // exactly one
  bool chat = false;
  bool thinking = true;               // of --chat
  std::optional<std::string> system;  // replaces the model's default; "" = no system message
  std::int64_t max_tokens = 128;
  bool ignore_eos = false;
  ops::SamplingOptions sampling;
  bool json = false;
};

struct PerplexityArgs {
  ModelArgs model;
  std::optional<std::string> text_file, tokens_file;  // exactly one
  std::optional<std::int64_t> max_tokens;
  bool json = false;
};

struct LogitsArgs {
  ModelArgs model;
  std::string tokens_file, out;
  bool json = false;
};

struct TokenizeArgs {
  std::string model;
  std::optional<std::string> text, text_file;  // exactly one
  bool special = true;  // BOS if the tokenizer says so, special tokens in the text parsed
  bool json = false;
};

struct ConvertArgs {
  std::string in, out;
  std::optional<DType> type;  // nothing: as they are
  int threads = 0;            // 0 = one per core
  bool json = false;
};

struct InfoArgs {
  std::optional<std::string> model;
  bool json = false;
};

struct BenchArgs {
  ModelArgs model;
  std::int64_t depth_tokens = 32;  // before the tokens whose decoding is measured
  bool json = false;
};

struct ServeArgs {
  ModelArgs model;  // its window is that of requests that do not say; its chunk is the most tokens of a pass
  std::string host = "127.0.0.1";
  std::int64_t port = 8000;  // 0 = any free one
  std::optional<std::string> api_key;
  bool no_auth = false;
  std::optional<std::string> served_model_name;
  std::optional<std::int64_t> max_model_len;
  std::int64_t max_num_seqs = 32;
  std::optional<std::int64_t> max_num_batched_tokens;
  std::optional<std::int64_t> kv_memory_bytes;
  std::int64_t max_queued = 1024;
  bool prefix_cache = true;
  bool quiet = false;
};

struct ChatArgs {
  ModelArgs model;                 // without a model: of the requests to the server
  std::optional<std::string> url;  // this or a model
  std::optional<std::string> api_key, system;
  std::optional<std::int64_t> max_tokens;
  ops::SamplingOptions sampling;
};

inline constexpr std::int64_t kMostClients = 4096;  // of bench serve, at once

struct BenchServeArgs {
  std::string url;
  std::optional<std::string> api_key;
  std::int64_t requests = 32, concurrency = 8;
  double rate = 0.0;  // requests a second, at random times; 0 = the next when one has ended
  std::int64_t input_tokens = 256, output_tokens = 256, shared_tokens = 0;
  std::optional<std::int64_t> vocabulary;  // ids of prompts are below; nothing: the server's
  std::optional<std::int64_t> window;
  std::int64_t sink_tokens = 0;
  std::uint64_t seed = 0;
  bool json = false;
};

struct ProbeArgs {
  ModelArgs model;                        // the model is empty with a trace
  std::optional<std::string> trace_file;  // either a model and one of the two texts, or this
  std::optional<std::string> text_file, tokens_file;
  std::string out;
  std::optional<std::int64_t> max_tokens;
  bool allow_beyond_context = false;
  std::int64_t map_bins = 512;
  std::int64_t topk = 0;        // of a model: width of the recorded sets, 0 = none; of a raw trace: its width
  std::int64_t layers = 0;      // of a raw trace
  std::int64_t from_query = 0;  // of a trace: first query of the study; 0 = topk
  std::int64_t to_query = 0;    // of a trace: last query of the study; 0 = its last
  double target = 0.95;         // share of the mass to keep
  bool advise = true;
  bool json = false;
};

/// --help or --version: text for stdout, and nothing else to do.
struct ShowText {
  std::string text;
};

using Command = std::variant<ShowText, GenerateArgs, PerplexityArgs, LogitsArgs, TokenizeArgs, ConvertArgs,
                             InfoArgs, BenchArgs, ServeArgs, ChatArgs, BenchServeArgs, ProbeArgs>;

/// Throws UsageError. Touches no file.
Command parse(int argc, const char* const* argv);

}  // namespace basin::cli
