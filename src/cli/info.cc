// basin info: this build and machine, or a model.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "basin/base/cpu_target.h"
#include "basin/base/thread_pool.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "models/model.h"

namespace basin::cli {
namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

// "a, b" -> {"a", "b"}
std::vector<std::string> split_list(const std::string& list) {
  std::vector<std::string> items;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(", ", begin), list.size());
    items.push_back(list.substr(begin, end - begin));
    begin = end + 2;
  }
  return items;
}

int describe_build(bool json) {
  const ThreadPool pool(0);
  std::vector<std::string> runnable;
  for (const CpuTarget target : kCpuTargets) {
    if (runs_here(target)) runnable.emplace_back(name(target));
  }
  const std::string target(name(cpu_target()));
  if (json) {
    nlohmann::ordered_json object;
    object["version"] = BASIN_VERSION;
    object["cpu"] = {
        {"name", cpu_name()}, {"target", target}, {"targets_here", runnable}, {"cores", pool.threads()}};
    object["backends"] = {"cpu"};
    object["architectures"] = split_list(models::supported_architectures());
    write_json(object);
    return 0;
  }
  std::string text;
  text += fmt::format("basin          {}\n", BASIN_VERSION);
  text += fmt::format("CPU            {}, {} cores\n", cpu_name(), pool.threads());
  text += fmt::format("CPU target     {} (this machine runs {}; BASIN_CPU chooses)\n", target,
                      fmt::join(runnable, ", "));
  text += "backends       cpu\n";
  text += fmt::format("architectures  {}\n", models::supported_architectures());
  write_stdout(text);
  return 0;
}

std::string describe_layers(const std::vector<models::LayerAttention>& layers) {
  std::int64_t local = 0, with_sink = 0;
  for (const models::LayerAttention& layer : layers) {
    if (layer.window > 0) ++local;
    if (layer.sink_logit) ++with_sink;
  }
  std::string text = fmt::format("{}", layers.size());
  text += local > 0 ? fmt::format(", {} of them with a window", local) : ", all with full attention";
  if (with_sink > 0) text += fmt::format(", {} with sink logits", with_sink);
  return text;
}

int describe_model(const std::string& path, bool json) {
  const models::Loaded loaded = models::load(path);
  const models::ModelConfig& config = loaded.model->config();
  if (json) {
    nlohmann::ordered_json object;
    object["architecture"] = config.architecture;
    object["parameters"] = loaded.model->parameters();
    object["context"] = config.context;
    object["layers"] = nlohmann::ordered_json::array();
    for (const models::LayerAttention& layer : config.layers) {
      nlohmann::ordered_json entry;
      entry["window"] = nullptr;  // unlimited
      if (layer.window > 0) entry["window"] = layer.window;
      entry["sink_logit"] = layer.sink_logit;
      object["layers"].push_back(entry);
    }
    object["weight_bytes"] = loaded.model->weight_bytes();
    write_json(object);
    return 0;
  }
  std::string text;
  text += fmt::format("architecture  {}\n", config.architecture);
  text += fmt::format("parameters    {}\n", loaded.model->parameters());
  text += fmt::format("weights       {}\n", human_bytes(static_cast<double>(loaded.model->weight_bytes())));
  text += fmt::format("context       {} tokens\n", config.context);
  text += fmt::format("layers        {}\n", describe_layers(config.layers));
  text += fmt::format("hidden        {}, feed-forward {}\n", config.hidden, config.intermediate);
  if (config.experts > 0)
    text += fmt::format("experts       {}, {} for each token{}\n", config.experts, config.chosen_experts,
                        config.grouped && config.grouped->shared > 0
                            ? fmt::format(" and {} for all", config.grouped->shared)
                            : "");
  if (config.latent)
    text += fmt::format("latent        {} for each token and layer\n", config.latent->latent());
  if (config.indexer) {
    text +=
        fmt::format("indexer       {} keys for each token, chosen by {} of {} layers\n", config.indexer->topk,
                    std::ranges::count(config.indexer->shared, false), config.layers.size());
  }
  text +=
      fmt::format("heads         {} query, {} key-value, size {}\n", config.h_q, config.h_kv, config.d_head);
  text += fmt::format("vocabulary    {}{}\n", config.vocabulary,
                      config.tied_embeddings ? ", tied embeddings" : "");
  text += fmt::format("tokenizer     {}\n", loaded.tokenizer ? "yes" : "none: only --tokens works");
  write_stdout(text);
  return 0;
}

}  // namespace

int run(const ShowText& args) {
  write_stdout(args.text);
  return 0;
}

int run(const InfoArgs& args) {
  return args.model ? describe_model(*args.model, args.json) : describe_build(args.json);
}

}  // namespace basin::cli
