// From a MODEL argument to a model: find the files, recognise the architecture, bind the tensors.
#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "models/architecture.h"
#include "models/config.h"
#include "models/decoder.h"
#include "models/f8_config.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "weights/gguf.h"
#include "weights/json_file.h"
#include "weights/map_cached.h"
#include "weights/weights.h"

namespace basin::models {
namespace {

namespace fs = std::filesystem;

// The registry: a new decoder-only model is its file and one entry here.
constexpr std::array<const Architecture*, 7> kArchitectures = {
    &kLlama, &kQwen3, &kGptOss, &kGemma3, &kDeepseekV3, &kDeepseekV32, &kGlmMoeDsa};

constexpr std::uint64_t kMaxConfigBytes = 16u << 20;

Loaded load_safetensors(const fs::path& tensors, const fs::path& directory) {
  const fs::path config_path = directory / "config.json";
  nlohmann::json json = weights::read_json_object(config_path, kMaxConfigBytes);
  if (!json.contains("model_type") || !json["model_type"].is_string()) {
    throw Error(ErrorCode::corrupt, fmt::format("{} has no 'model_type'", config_path.string()));
  }
  const Architecture& architecture =
      find_architecture(json["model_type"].get<std::string>(), &Architecture::name, config_path.string());
  const std::optional<weights::F8Block> f8_block = take_f8_block(json, config_path.string());
  ModelConfig config = read_hf_config(json, architecture, config_path.string());
  auto file = std::make_shared<weights::SafetensorsFile>(tensors.extension() == ".json"
                                                             ? weights::read_safetensors_index(tensors)
                                                             : weights::read_safetensors(tensors));
  if (f8_block) weights::expand_f8(*file, *f8_block, tensors.string());
  Loaded loaded;
  loaded.model = make_decoder(architecture, Format::hugging_face, std::move(config),
                              TensorTable(file->tensors, tensors.string()), file);
  std::error_code ignored;
  if (fs::exists(directory / "tokenizer.json", ignored)) {
    loaded.tokenizer = std::make_shared<text::Tokenizer>(text::Tokenizer::from_directory(directory));
    loaded.chat_template = text::read_chat_template(directory);
  }
  return loaded;
}

Loaded load_gguf(const fs::path& path) {
  auto file = std::make_shared<weights::GgufFile>(weights::read_gguf(path));
  weights::map_cached(*file->file);
  const auto it = file->metadata.find("general.architecture");
  if (it == file->metadata.end() || !std::holds_alternative<std::string>(it->second)) {
    throw Error(ErrorCode::corrupt, fmt::format("{} does not name its architecture", path.string()));
  }
  const Architecture& architecture =
      find_architecture(std::get<std::string>(it->second), &Architecture::gguf_name, path.string());
  ModelConfig config = read_gguf_config(*file, architecture, path.string());
  Loaded loaded;
  if (file->metadata.contains("tokenizer.ggml.model")) {
    try {
      loaded.tokenizer = std::make_shared<text::Tokenizer>(text::Tokenizer::from_gguf(*file));
    } catch (const Error& error) {  // which knows the metadata, not the file
      throw error.in(path.string());
    }
    if (loaded.tokenizer->vocabulary() > config.vocabulary) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("{}: the tokenizer has {} tokens and the model {}", path.string(),
                              loaded.tokenizer->vocabulary(), config.vocabulary));
    }
  }
  if (const auto found = file->metadata.find("tokenizer.chat_template"); found != file->metadata.end()) {
    const auto* chat_template = std::get_if<std::string>(&found->second);
    if (chat_template != nullptr) loaded.chat_template = *chat_template;
  }
  // The vocabulary and its merges are as large as a small model; the tokenizer has its own copy by now.
  file->metadata.clear();
  loaded.model = make_decoder(architecture, Format::gguf, std::move(config),
                              TensorTable(file->tensors, path.string()), file);
  return loaded;
}

}  // namespace

const Architecture& find_architecture(const std::string& name, const char* Architecture::*spelling,
                                      const std::string& where) {
  for (const Architecture* architecture : kArchitectures) {
    if (architecture->*spelling != nullptr && name == architecture->*spelling) return *architecture;
  }
  throw Error(ErrorCode::unsupported,
              fmt::format("{}: the architecture '{}' is not supported", where, name.substr(0, 100)),
              "supported are " + supported_architectures());
}

Loaded load(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    const fs::path single = path / "model.safetensors";
    if (fs::exists(single, ignored)) return load_safetensors(single, path);
    const fs::path index = path / "model.safetensors.index.json";
    if (fs::exists(index, ignored)) return load_safetensors(index, path);
    throw Error(ErrorCode::not_found, fmt::format("{} holds no model", path.string()),
                "a model directory has config.json and model.safetensors or its shards with their index; a "
                ".gguf file is named itself");
  }
  weights::require_exists(path);
  if (path.extension() == ".gguf") return load_gguf(path);
  if (path.extension() == ".safetensors") return load_safetensors(path, path.parent_path());
  throw Error(ErrorCode::unsupported,
              fmt::format("{} is no model: its name ends in neither .gguf nor .safetensors", path.string()),
              "name a directory in the Hugging Face layout, a .gguf file, or a .safetensors file beside its "
              "config.json");
}

std::string supported_architectures() {
  std::string names;
  for (const Architecture* architecture : kArchitectures)
    names += (names.empty() ? "" : ", ") + std::string(architecture->name);
  return names;
}

}  // namespace basin::models
