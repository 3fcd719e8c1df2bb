#include "models/checkpoint.h"

#include <unistd.h>

#include <atomic>
#include <cctype>
#include <fstream>
#include <stdexcept>

#include "models/architecture.h"
#include "models/model.h"
#include "support/golden.h"

namespace basin::test {
namespace {

namespace fs = std::filesystem;

nlohmann::json read_config(const fs::path& model) {
  std::ifstream in(model / "config.json");
  return nlohmann::json::parse(in);
}

}  // namespace

std::vector<fs::path> supported_golden_models() {
  std::vector<fs::path> models;
  for (const fs::path& model : golden_models()) {
    const std::string family = read_config(model).at("model_type");
    const std::string known = ", " + models::supported_architectures() + ",";
    if (known.find(", " + family + ",") != std::string::npos) models.push_back(model);
  }
  return models;
}

std::vector<fs::path> golden_models_with_gguf() {
  std::vector<fs::path> models = supported_golden_models();
  std::erase_if(models, [](const fs::path& model) {
    const std::string family = read_config(model).at("model_type");
    return models::find_architecture(family, &models::Architecture::name, family).gguf_name == nullptr;
  });
  return models;
}

fs::path golden_model(const std::string& family) {
  // Always the repository's copy: what BASIN_GOLDEN_DIR holds may lack a family or be too short for a test.
  const fs::path models = fs::path(BASIN_SOURCE_DIR) / "tests" / "golden" / "models";
  if (family == "llama") return models / "llama3_rope_tiny";
  if (family == "qwen3") return models / "qwen3_tiny";
  if (family == "gpt_oss") return models / "gpt_oss_tiny";
  if (family == "gemma3_text") return models / "gemma3_tiny";
  if (family == "deepseek_v3") return models / "deepseekv3_tiny";
  if (family == "deepseek_v32") return models / "deepseekv32_tiny";
  if (family == "glm_moe_dsa") return models / "glmmoedsa_tiny";
  throw std::runtime_error("no golden model of the family " + family);
}

std::string folder_name(const fs::path& folder) {
  std::string name = folder.filename().string();
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

Checkpoint::Checkpoint(const fs::path& model)
    : config(read_config(model)), source_(weights::read_safetensors(model / "model.safetensors")) {
  static std::atomic<int> number = 0;
  tensors = source_.tensors;
  folder_ = fs::temp_directory_path() /
            ("basin_checkpoint_" + std::to_string(::getpid()) + "_" + std::to_string(number.fetch_add(1)));
  fs::create_directories(folder_);
}

Checkpoint::~Checkpoint() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

const fs::path& Checkpoint::write() {
  std::ofstream(folder_ / "config.json") << config.dump(2);
  std::vector<weights::Tensor> list;
  for (const auto& [name, tensor] : tensors) {
    list.push_back(tensor);
    list.back().name = name;
  }
  weights::write_safetensors(folder_ / "model.safetensors", list);
  return folder_;
}

void Checkpoint::cut(std::int64_t layers) {
  const std::string prefix = "model.layers.";
  std::erase_if(tensors, [&](const auto& entry) {
    return entry.first.starts_with(prefix) && std::stoll(entry.first.substr(prefix.size())) >= layers;
  });
  config["num_hidden_layers"] = layers;
  if (config.contains("layer_types"))
    config["layer_types"] = std::vector<std::string>(static_cast<std::size_t>(layers), "full_attention");
}

}  // namespace basin::test
